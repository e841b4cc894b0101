"""Every setting of a worker, written once. The command line (`flags.py`) and the docs follow from here.

Names are those of SGLang's flags where it has one. This module checks values only. What depends on the
machine or the model (free memory, longest context) is checked by the part that knows it.

Metadata of a field: `help`; `group`, the heading of `--help` for this field and those after it; `choices`,
`low`, `high`, the values that are valid; `also`, further spellings of the flag; `spelled`, further
spellings of values; `elsewhere`, values of SGLang that change no answer and do not exist here: the default
stands for them; `variable`, the environment variable of a secret.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Steps differ in size: what one leaves free on the device has to serve others of another size.
_TORCH = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

SMALL_MODEL = Path(__file__).resolve().parent / "model" / "small"


def _flag(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


def default_server_processes(device: str, cores: int) -> int:
    """For a worker that may use so many cores. A GPU makes tokens faster than one process can send."""
    on_gpu = device == "cuda" or (device == "auto" and any(Path("/dev").glob("nvidia[0-9]*")))
    return max(1, min(4, cores // 4)) if on_gpu else 1


class ConfigError(ValueError):
    """A setting that cannot work; the message names the flag and the mend."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    model_path: str = _flag(
        "",
        "folder of the model in Hugging Face's format, or its name on the Hugging Face Hub, such as "
        "deepseek-ai/DeepSeek-V2-Lite; empty: the small model that the package ships",
        group="model (what is served)",
        also=("--model",),
    )
    revision: str = _flag(
        "", "branch, tag or commit, if --model-path is a name on the hub; empty: main"
    )
    download_dir: str = _flag("", "folder for downloads; empty: Hugging Face's own cache (HF_HOME)")
    tokenizer_path: str = _flag("", "folder or hub name of the tokenizer; empty: the model's own")
    served_model_name: str = _flag(
        "", "name in /v1/models; empty: the name on the hub, or the folder's name"
    )
    load_format: str = _flag(
        "auto",
        "auto: the folder's safetensors; dummy: random values in their shapes, without reading any",
        choices=("auto", "dummy"),
        spelled={"safetensors": "auto"},
    )
    context_length: int = _flag(
        0, "longest prompt + output in tokens; 0: the model's own limit", low=0
    )
    dtype: str = _flag(
        "auto",
        "type of weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
        spelled={"half": "float16", "float": "float32"},
    )
    quantization: str = _flag(
        "",
        "what the checkpoint is quantized by, such as fp8; it is read from config.json, and a value that "
        "differs is refused",
    )
    chat_template: str = _flag(
        "",
        "file with the chat template in Jinja; empty: the tokenizer's own",
        group="answers (how the model's text is read)",
    )
    tool_call_parser: str = _flag(
        "auto",
        "how the model writes tool calls; auto: as its chat template does",
        choices=("auto", "deepseek_v3", "deepseek_v31", "llama3", "none"),
        spelled={"deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31"},
    )
    reasoning_parser: str = _flag(
        "auto",
        "how the model writes its reasoning; auto: as its chat template does",
        choices=("auto", "deepseek_r1", "none"),
        spelled={"deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_r1"},
    )
    grammar_backend: str = _flag(
        "xgrammar",
        "what makes output follow a JSON schema, regex or EBNF; none: such requests are refused",
        choices=("xgrammar", "none"),
        elsewhere=("outlines", "llguidance"),
    )
    constrained_json_disable_any_whitespace: bool = _flag(
        False,
        "JSON that follows a schema has one blank behind each comma and colon and no other space "
        "between its values; more of it is certain then, and jumped over",
    )
    disable_jump_forward: bool = _flag(
        False,
        "ask the model also where a grammar allows one text alone; else the tokens of such text are "
        "computed in one step",
    )
    random_seed: int = _flag(0, "seed of requests that bring none; 0: a fresh one each", low=0)
    stream_interval: int = _flag(
        1,
        "tokens of an answer that are sent together; its first and its last are never held back",
        low=1,
    )
    host: str = _flag(
        "127.0.0.1", "address to listen on", group="address (how clients reach the worker)"
    )
    port: int = _flag(31000, "port to listen on", low=0, high=65535)
    worker_id: str = _flag("", "name in logs and in the x-mla-worker header; empty: HOST:PORT")
    api_key: str = _flag(
        "",
        "key that clients must send as `Authorization: Bearer`; better set MLA_ROUTER_API_KEY in the "
        "environment, which no other user can read; empty: the variable's, or none",
        variable="MLA_ROUTER_API_KEY",
    )
    admin_api_key: str = _flag(
        "",
        "key for the paths that change the worker for everybody, such as /flush_cache; better set "
        "MLA_ROUTER_ADMIN_API_KEY in the environment; empty: the variable's, or --api-key",
        variable="MLA_ROUTER_ADMIN_API_KEY",
    )
    replay_key: str = _flag(
        "",
        "secret that the router has as well, so that it can have this worker continue another's broken stream; "
        "better set MLA_ROUTER_REPLAY_KEY in the environment; empty: the variable's, or none, and streams "
        "are not continued",
        variable="MLA_ROUTER_REPLAY_KEY",
    )
    max_payload_size: int = _flag(64 << 20, "largest request body in bytes", low=1024)
    tokenizer_worker_num: int = _flag(
        0,
        "processes that answer HTTP, tokenize and detokenize, all on one port; 0: one on a CPU, on a "
        "GPU one for each 4 cores, at most 4",
        low=0,
        high=64,
    )
    device: str = _flag(
        "auto",
        "auto: a GPU if there is one",
        choices=("auto", "cpu", "cuda"),
        group="device (where it runs, and with which kernels)",
    )
    base_gpu_id: int = _flag(0, "first GPU of this worker", low=0)
    tp_size: int = _flag(
        1,
        "GPUs that share one copy of the model; only 1 works yet",
        low=1,
        also=("--tensor-parallel-size", "--tp"),
    )
    cpu_threads: int = _flag(0, "threads of torch on a CPU; 0: torch's own choice", low=0)
    attention_backend: str = _flag(
        "auto",
        "attention kernels; auto: triton on a GPU in 16 bits, else torch, the reference, and FlashInfer's "
        "where it is installed and heads are many (64 and more); flashinfer: triton with FlashInfer's "
        "prefill, for DeepSeek's heads on Hopper GPUs",
        choices=("auto", "triton", "flashinfer", "torch"),
        spelled={"torch_native": "torch"},
        elsewhere=("fa3", "fa4", "flashmla", "cutlass_mla", "trtllm_mla", "flex_attention"),
    )
    enable_flashinfer_mla: bool = _flag(
        False,
        "decode latent attention by FlashInfer's kernel, for Hopper GPUs; --attention-backend is then "
        "for prefill",
    )
    disable_mla: bool = _flag(
        False,
        "keep keys and values of all heads in the KV cache instead of latents (to see what latents bring)",
    )
    disable_cuda_graph: bool = _flag(False, "launch decode steps kernel by kernel")
    cuda_graph_max_bs: int = _flag(
        256, "most rows of decode steps that are recorded as CUDA graphs", low=1, high=4096
    )
    piecewise_cuda_graph_max_tokens: int = _flag(
        4096,
        "largest step with prompt tokens that is recorded, in pieces around its attention or, where it is "
        "one prompt without a cached prefix, whole; 0: none",
        low=0,
        high=65536,
    )
    cuda_graph_bs: str = _flag(
        "",
        "batch sizes to record, such as 1 2 4 8; empty: a choice up to --cuda-graph-max-bs",
        several=True,
    )
    enable_torch_compile: bool = _flag(
        False,
        "run the projections and feed-forward layers of recorded decode steps through torch.compile; "
        "makes the start minutes longer",
    )
    torch_compile_max_bs: int = _flag(
        32, "largest batch of decode steps that --enable-torch-compile is for", low=1, high=4096
    )
    mem_fraction_static: float = _flag(
        0.85,
        "share of GPU memory for weights and KV cache together",
        low=0.05,
        high=0.98,
        group="memory (the KV cache)",
    )
    max_total_tokens: int = _flag(
        0, "KV cache size in tokens; 0: by --mem-fraction-static, or 65536 on a CPU", low=0
    )
    page_size: int = _flag(16, "tokens a page of KV cache", choices=(1, 16, 32, 64))
    max_running_requests: int = _flag(
        1024, "requests in one batch", low=1, high=4096, group="scheduling (who is computed when)"
    )
    max_queued_requests: int = _flag(
        0,
        "requests that may wait for a place; more get a 429; 0: as many as --max-running-requests",
        low=0,
    )
    max_queued_seconds: float = _flag(
        0.0,
        "seconds that the prompts which wait may take on this device, without what is cached of them; a request "
        "behind more gets a 429; 0: any",
        low=0.0,
    )
    max_prefill_tokens: int = _flag(
        8192,
        "most prompt tokens computed in one step, of all requests together; fewer on devices where so many would "
        "take longer than 0.4 s",
        low=1,
    )
    chunked_prefill_size: int = _flag(
        8192,
        "prompt tokens of one request in one step; longer prompts take several; -1: as many as "
        "--max-prefill-tokens allows",
        low=-1,
    )
    disable_mixed_chunk: bool = _flag(
        False, "compute prompt tokens and decode running requests in steps of their own, in turn"
    )
    schedule_policy: str = _flag(
        "lpm",
        "which request comes next: lpm, short prompts and long cached prefixes first, and half of each step for the "
        "oldest, so that long prompts advance as well; fcfs, the oldest",
        choices=("lpm", "fcfs"),
        elsewhere=("dfs-weight", "lof", "random"),
    )
    schedule_conservativeness: float = _flag(
        1.0,
        "how long answers are expected to be; higher if requests are often retracted for memory, "
        "lower if much of it stays empty",
        low=0.01,
        high=10.0,
    )
    enable_priority_scheduling: bool = _flag(
        False, "let requests of higher `priority` go first, and take the place of lower ones"
    )
    disable_radix_cache: bool = _flag(False, "never reuse the KV cache of an earlier request")
    disable_overlap_schedule: bool = _flag(
        False, "finish each step before planning the next (to see what overlap brings)"
    )
    watchdog_timeout: float = _flag(
        30.0,
        "seconds without a scheduler heartbeat, in any server process, until /health says 503; after four times "
        "as long the worker ends, and launch_server starts it anew",
        low=1.0,
        group="operation (logs and limits of time)",
    )
    profile_dir: str = _flag("", "folder for the traces of /start_profile; empty: that is refused")
    log_level: str = _flag(
        "info", "least severe log lines to print", choices=("debug", "info", "warning", "error")
    )
    log_requests: bool = _flag(
        False, "print a line for each request that has ended: its id, path, status and seconds"
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value, meta = getattr(self, spec.name), spec.metadata
            flag = "--" + spec.name.replace("_", "-")
            if "choices" in meta and value not in meta["choices"]:
                raise ConfigError(f"{flag} {value}: choose one of {meta['choices']}")
            if "low" in meta and value < meta["low"]:
                raise ConfigError(f"{flag} {value}: at least {meta['low']}")
            if "high" in meta and value > meta["high"]:
                raise ConfigError(f"{flag} {value}: at most {meta['high']}")
        if not re.fullmatch(r"(\d{1,4}(,\d{1,4})*)?", self.cuda_graph_bs):
            raise ConfigError(f"--cuda-graph-bs {self.cuda_graph_bs}: numbers with commas between")
        if self.tp_size != 1:
            raise ConfigError(f"--tp-size {self.tp_size}: only 1 works yet; use --dp-size instead")
        if self.chunked_prefill_size == 0:
            raise ConfigError("--chunked-prefill-size 0: at least 1, or -1 for whole prompts")

    @property
    def decode_graph_sizes(self) -> list[int]:
        """Batch sizes of --cuda-graph-bs; empty: not said."""
        sizes = {int(size) for size in self.cuda_graph_bs.split(",") if size}
        return sorted(size for size in sizes if 0 < size <= self.max_running_requests)

    @property
    def chunk_size(self) -> int:
        """Prompt tokens of one request in one step, at most."""
        return (
            self.max_prefill_tokens if self.chunked_prefill_size < 0 else self.chunked_prefill_size
        )

    @property
    def folder(self) -> Path:
        """The model's folder; names on the hub have been resolved (`model_folder.locate`)."""
        return Path(self.model_path) if self.model_path else SMALL_MODEL

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.tokenizer_path) if self.tokenizer_path else self.folder

    @property
    def model_name(self) -> str:
        return self.served_model_name or ("mla-small" if not self.model_path else self.folder.name)

    @property
    def name(self) -> str:
        return self.worker_id or f"{self.host}:{self.port}"

    def settings(self) -> dict[str, Any]:
        """What may be shown of it: all but the secrets."""
        return {
            spec.name: getattr(self, spec.name)
            for spec in dataclasses.fields(self)
            if "variable" not in spec.metadata
        }

    def to_argv(self) -> list[str]:
        """The flags that make this config, so that a child process shows in `ps` what it runs. What
        nobody should see there goes by `child_environment`."""
        argv = []
        for spec in dataclasses.fields(self):
            value, flag = getattr(self, spec.name), "--" + spec.name.replace("_", "-")
            if value != spec.default and "variable" not in spec.metadata:
                argv += [flag] if value is True else [f"{flag}={value}"]
        return argv

    def child_environment(self) -> dict[str, str]:
        """Our own environment, what torch should know, and the secrets of this config."""
        secrets = {
            spec.metadata["variable"]: str(value)
            for spec in dataclasses.fields(self)
            if "variable" in spec.metadata and (value := getattr(self, spec.name))
        }
        return {**_TORCH, **os.environ, **secrets}


def secrets_of_environment() -> dict[str, str]:
    """Settings that are better given there than by a flag, which every user of the machine can read."""
    return {
        spec.name: os.environ.get(spec.metadata["variable"], "")
        for spec in dataclasses.fields(WorkerConfig)
        if "variable" in spec.metadata
    }
