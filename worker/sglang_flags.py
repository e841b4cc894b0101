"""Flags of SGLang's `launch_server` without a setting here, so that its command lines start a worker.

Most have no effect: they enable a feature that is always on, or tune a part that does not exist here. They are accepted
and named in one log line. Others would change the answers or the served model: they are refused with the reason. Values
that equal the behaviour here are accepted silently.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from mla_router.worker.config import ConfigError

# Values of a flag: none, one, or any number.
SWITCH, ONE, MANY = 0, None, "*"


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    reason: str
    nargs: int | str | None = SWITCH
    holds: tuple[str, ...] = ()  # values that equal the behaviour here
    refused: bool = False


def _tunes(reason: str, nargs: int | str | None = SWITCH, *holds: str) -> ForeignFlag:
    return ForeignFlag(reason, nargs, holds)


def _refused(reason: str, nargs: int | str | None = SWITCH, *holds: str) -> ForeignFlag:
    return ForeignFlag(reason, nargs, holds, refused=True)


_ALWAYS = "always on"
_ONE_WAY = "ranks exchange by gloo on a CPU; by our kernels and NCCL on GPUs"
_ONE_PLACEMENT = "experts stay where --init-expert-location places them"
_OTHER_PARALLELISM = "a model is shared by --tp-size and --ep-size"
_SEVERAL = "this is one worker; mla_router.launch_server starts several"
_NO_LORA = "adapters (LoRA) are not supported"
_NO_DISAGGREGATION = "prefill and decode run in one worker"
_NO_SECOND_TIER = "the KV cache has no second tier"
_KERNELS = "kernels are chosen by --attention-backend"

FLAGS: dict[str, ForeignFlag] = {
    # always on
    "--enable-metrics": _tunes("/metrics is always there"),
    "--enable-cache-report": _tunes("usage always reports cached tokens"),
    "--enable-mixed-chunk": _tunes("on unless --disable-mixed-chunk"),
    "--trust-remote-code": _tunes("a model's own code is never run"),
    "--enable-multimodal": _tunes("on if the model takes images"),
    "--skip-server-warmup": _tunes("no request is sent to warm up"),
    "--warmups": _tunes("no request is sent to warm up", ONE),
    "--tokenizer-mode": _tunes("always the fast tokenizer", ONE, "auto"),
    "--enable-request-time-stats-logging": _tunes("see /metrics"),
    "--abort-on-priority-when-disabled": _tunes(_ALWAYS),
    "--enable-metrics-for-all-schedulers": _tunes(_ALWAYS),
    "--collect-tokens-histogram": _tunes(_ALWAYS),
    "--enable-tokenizer-batch-encode": _tunes("prompts of a batch are tokenized one by one"),
    "--enable-piecewise-cuda-graph": _tunes("on unless --disable-cuda-graph"),
    "--radix-eviction-policy": _tunes("least recently used first", ONE, "lru"),
    # logs
    "--log-level-http": _tunes("--log-level is for all lines", ONE),
    "--log-requests-level": _tunes("--log-requests prints no prompts", ONE, "0"),
    "--show-time-cost": _tunes("see /metrics"),
    "--decode-log-interval": _tunes("see /metrics", ONE),
    "--gc-warning-threshold-secs": _tunes("no such warning", ONE),
    "--crash-dump-folder": _tunes("no dumps are written", ONE),
    "--enable-trace": _tunes("the router sends traces: its --otlp-traces-endpoint"),
    "--otlp-traces-endpoint": _tunes("the router sends traces: its --otlp-traces-endpoint", ONE),
    "--kv-events-config": _tunes("caches are not announced by events", ONE),
    # devices and processes that work together
    "--nccl-port": _tunes("NCCL chooses its ports", ONE),
    "--gpu-id-step": _tunes("the GPUs of --dp-size are adjacent", ONE, "1"),
    "--enable-p2p-check": _tunes(_ONE_WAY),
    "--enable-nccl-nvls": _tunes(_ONE_WAY),
    "--enable-symm-mem": _tunes(_ONE_WAY),
    "--enable-mscclpp": _tunes(_ONE_WAY),
    "--enable-flashinfer-allreduce-fusion": _tunes(_ONE_WAY),
    "--enable-dp-lm-head": _tunes(_ONE_WAY),
    "--deepep-mode": _tunes("the number of rows decides", ONE, "auto"),
    "--moe-dense-tp-size": _tunes(_ONE_WAY, ONE, "1"),
    "--enable-eplb": _tunes(_ONE_PLACEMENT),
    "--eplb-algorithm": _tunes(_ONE_PLACEMENT, ONE, "auto", "deepseek"),
    "--eplb-rebalance-num-iterations": _tunes(_ONE_PLACEMENT, ONE),
    "--ep-dispatch-algorithm": _tunes("a token's row decides between replicas", ONE, "static"),
    "--expert-distribution-recorder-mode": _tunes("pairs are counted by expert", ONE, "stat"),
    "--expert-distribution-recorder-buffer-size": _tunes("counts are sums", ONE),
    "--enable-two-batch-overlap": _tunes(_ONE_WAY),
    "--load-balance-method": _tunes("the router chooses: --router-policy", ONE),
    "--numa-node": _tunes("use numactl", MANY),
    # kernels and memory
    "--sampling-backend": _tunes("one implementation", ONE),
    "--moe-runner-backend": _tunes("one implementation", ONE, "auto", "triton"),
    "--prefill-attention-backend": _tunes(_KERNELS, ONE),
    "--decode-attention-backend": _tunes(_KERNELS, ONE),
    "--mm-attention-backend": _tunes("one implementation", ONE),
    "--flashinfer-mla-disable-ragged": _tunes(_KERNELS),
    "--triton-attention-num-kv-splits": _tunes("splits follow from the batch", ONE),
    "--triton-attention-reduce-in-fp32": _tunes(_ALWAYS),
    "--disable-shared-experts-fusion": _tunes(
        "shared experts run at the same time as the routed ones"
    ),
    "--disable-chunked-prefix-cache": _tunes(_KERNELS),
    "--disable-cuda-graph-padding": _tunes("see --cuda-graph-bs"),
    "--enable-cudagraph-gc": _tunes("no such setting"),
    "--enable-profile-cuda-graph": _tunes("no such setting"),
    "--num-continuous-decode-steps": _tunes("each step is planned", ONE, "1"),
    "--scheduler-recv-interval": _tunes("requests are received in each step", ONE, "1"),
    "--sleep-on-idle": _tunes(_ALWAYS),
    "--enable-memory-saver": _tunes("weights stay on the device"),
    "--weight-loader-disable-mmap": _tunes("weights are read with mmap"),
    "--model-loader-extra-config": _tunes("safetensors are loaded in one way", ONE),
    "--model-impl": _tunes("one implementation", ONE, "auto", "sglang"),
    "--enable-hierarchical-cache": _tunes(_NO_SECOND_TIER),
    "--hicache-ratio": _tunes(_NO_SECOND_TIER, ONE),
    "--hicache-size": _tunes(_NO_SECOND_TIER, ONE),
    "--hicache-write-policy": _tunes(_NO_SECOND_TIER, ONE),
    "--priority-scheduling-preemption-threshold": _tunes("any higher priority goes first", ONE),
    "--disable-outlines-disk-cache": _tunes("no such cache"),
    "--file-storage-path": _tunes("no files are stored", ONE),
    "--weight-version": _tunes("answers do not carry it", ONE),
    "--sampling-defaults": _refused("requests without a temperature get 1", ONE, "openai"),
    # refused: they would change the answers or the served model
    "--data-parallel-size": _refused(_SEVERAL, ONE, "1"),
    "--dp-size": _refused(_SEVERAL, ONE, "1"),
    "--dp": _refused(_SEVERAL, ONE, "1"),
    "--pipeline-parallel-size": _refused(_OTHER_PARALLELISM, ONE, "1"),
    "--pp-size": _refused(_OTHER_PARALLELISM, ONE, "1"),
    "--enable-dp-attention": _refused(_SEVERAL),
    "--torchao-config": _refused("weights are served as the checkpoint has them", ONE, ""),
    "--cpu-offload-gb": _refused("weights stay on the GPU", ONE, "0"),
    "--speculative-attention-mode": _tunes(_KERNELS, ONE),
    "--enable-lora": _refused(_NO_LORA),
    "--lora-paths": _refused(_NO_LORA, MANY),
    "--max-loras-per-batch": _refused(_NO_LORA, ONE),
    "--disaggregation-mode": _refused(_NO_DISAGGREGATION, ONE, "null"),
    "--disaggregation-transfer-backend": _refused(_NO_DISAGGREGATION, ONE),
    "--disaggregation-bootstrap-port": _refused(_NO_DISAGGREGATION, ONE),
    "--is-embedding": _refused("the models served here generate text only"),
    "--skip-tokenizer-init": _refused("there is no mode without a tokenizer; send token ids"),
    "--grpc-mode": _refused("the worker speaks HTTP"),
    "--completion-template": _refused("completions take their prompt as it is", ONE),
    "--json-model-override-args": _refused("edit config.json in a copy of the folder", ONE, "{}"),
    "--preferred-sampling-params": _refused("requests carry their own", ONE),
    "--enable-custom-logit-processor": _refused("requests cannot bring code"),
    "--enable-return-hidden-states": _refused("hidden states are not returned"),
    "--enable-deterministic-inference": _refused("not promised yet on a GPU"),
    "--allow-auto-truncate": _refused("longer requests get a 400"),
    "--schedule-low-priority-values-first": _refused("higher values go first"),
    "--config": _refused("give the flags themselves", ONE),
}


def add(parser: argparse.ArgumentParser, leave_out: frozenset[str]) -> None:
    """Adds all flags but those in `leave_out` to `parser`, hidden from --help."""
    for flag, foreign in FLAGS.items():
        if flag in leave_out:
            continue
        if foreign.nargs == SWITCH:
            parser.add_argument(
                flag, dest=flag, action="store_const", const="", help=argparse.SUPPRESS
            )
        else:
            parser.add_argument(flag, dest=flag, nargs=foreign.nargs, help=argparse.SUPPRESS)


def refuse(namespace: argparse.Namespace) -> None:
    """Raises ConfigError for the first given flag that is refused."""
    for flag, value, foreign in _given(namespace):
        if foreign.refused:
            raise ConfigError(f"{flag} {value}".rstrip() + f": {foreign.reason}")


def without_effect(namespace: argparse.Namespace) -> list[str]:
    """Returns the given flags that have no effect, each with the reason in brackets."""
    return [f"{flag} ({foreign.reason})" for flag, _, foreign in _given(namespace)]


def _given(namespace: argparse.Namespace) -> Iterator[tuple[str, str, ForeignFlag]]:
    for flag, foreign in FLAGS.items():
        value = getattr(namespace, flag, None)  # None: not given
        if value is not None and value not in foreign.holds:
            yield flag, " ".join(value) if isinstance(value, list) else value, foreign
