"""The command line of a worker: SGLang's spellings, and its flags without a setting here."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import pytest

from mla_router.worker import flags
from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.sglang_flags import FLAGS
from support.fake_worker import fake_worker
from support.processes import post_json

# A usual command line of SGLang 0.5, without the model's path and the address.
USUAL = shlex.split("""
--served-model-name deepseek --tensor-parallel-size 1 --data-parallel-size 1 --trust-remote-code
--reasoning-parser deepseek-r1 --tool-call-parser deepseekv3 --kv-cache-dtype auto --dtype half
--mem-fraction-static 0.8 --context-length 512 --chunked-prefill-size -1 --max-running-requests 64
--attention-backend fa3 --enable-mixed-chunk --enable-metrics --enable-cache-report --stream-interval 1
--skip-server-warmup --watchdog-timeout 300 --dist-timeout 600 --random-seed 7 --log-level-http warning
--show-time-cost --decode-log-interval 40 --cuda-graph-bs 1 2 4 --load-format safetensors --log-requests
--schedule-conservativeness 0.3 --sampling-backend flashinfer --device cuda --nnodes 1 --ep-size 1
""")


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_flags(parser)
    return parser.parse_args(argv)


def test_a_usual_command_line_of_sglang_has_the_same_meaning() -> None:
    namespace = parsed(*USUAL)
    assert flags.from_namespace(namespace) == WorkerConfig(
        served_model_name="deepseek",
        reasoning_parser="deepseek_r1",
        tool_call_parser="deepseek_v3",
        dtype="float16",
        mem_fraction_static=0.8,
        context_length=512,
        chunked_prefill_size=-1,
        max_running_requests=64,
        watchdog_timeout=300.0,
        random_seed=7,
        cuda_graph_bs="1,2,4",
        schedule_conservativeness=0.3,
        log_requests=True,
        device="cuda",
    )
    named = {line.split()[0] for line in flags.without_effect(namespace)}
    assert named == {
        "--attention-backend",
        "--trust-remote-code",
        "--enable-mixed-chunk",
        "--enable-metrics",
        "--enable-cache-report",
        "--skip-server-warmup",
        "--log-level-http",
        "--show-time-cost",
        "--decode-log-interval",
        "--sampling-backend",
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kv-cache-dtype", "fp4_e2m1"], "--kv-cache-dtype fp4_e2m1: choose one of"),
        (["--speculative-algorithm", "EAGLE3"], "--speculative-algorithm EAGLE3: choose one of"),
        (["--enable-lora"], r"--enable-lora: adapters \(LoRA\) are not supported"),
        (["--data-parallel-size", "2"], "launch_server starts several"),
        (["--tp", "8", "--ep", "3"], "--ep-size 3: must divide --tp-size 8"),
        (["--init-expert-location", "a.json"], "--init-expert-location: needs --ep-size of at"),
        (["--ep-num-redundant-experts", "2"], "--ep-num-redundant-experts: needs --ep-size of"),
        (
            ["--attention-backend", "magic"],
            "--attention-backend magic: choose one of auto, triton, flashinfer, torch",
        ),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size 0"),
        (["--watchdog-timeout", "nan"], "--watchdog-timeout nan: give a finite number"),
        (["--dist-timeout", "inf"], "--dist-timeout inf: give a finite number"),
        *(
            (
                ["--allowed-media-domains", f"a.com, {wrong}"],
                "--allowed-media-domains .*: give domains",
            )
            for wrong in ("https://b.com", "*.b.com", "b.com:80", "b.com/x", "b.com c.com")
        ),
        # It is a header of each answer, which then could not be sent
        (["--worker-id", "a\r\nx: y"], "--worker-id: has a control character"),
        (["--served-model-name", "a\nb"], "--served-model-name: has a control character"),
        (["--model-path", "/models/\udcff"], "--model-path: has bytes that are not UTF-8"),
    ],
)
def test_flags_that_change_answers_are_refused_with_the_reason(
    argv: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        flags.from_namespace(parsed(*argv))


def test_flags_that_are_not_given_are_not_reported() -> None:
    assert flags.without_effect(parsed()) == []
    assert flags.from_namespace(parsed()) == WorkerConfig()


def test_an_address_of_nodes_is_reported_if_there_is_one_node() -> None:
    address = ["--dist-init-addr", "10.0.0.1:5000"]
    assert flags.without_effect(parsed(*address)) == ["--dist-init-addr (there is one node)"]
    assert flags.without_effect(parsed(*address, "--nnodes", "2")) == []


def test_no_flag_of_sglang_hides_one_of_ours() -> None:
    ours = {"--" + name.replace("_", "-") for name in WorkerConfig.__dataclass_fields__}
    assert ours.isdisjoint(FLAGS)


def test_a_config_goes_to_a_child_process_unchanged() -> None:
    changed: dict[str, Any] = {"cuda_graph_bs": "1,2", "disable_mla": True, "page_size": 32}
    config = WorkerConfig(**changed)
    assert flags.from_namespace(parsed(*config.to_argv())) == config


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("", " is empty: give a key, or leave it out"),
        ("k\n", ": the key begins or ends"),
        ("\udcff", ": the key has bytes that are not UTF-8"),
    ],
)
@pytest.mark.parametrize("field", ["api_key", "admin_api_key", "replay_key", "dist_key"])
def test_a_key_that_no_client_can_give_is_refused(
    field: str, value: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `--api-key "$(cat NO_SUCH_FILE)"`: the server would be open."""
    flag, variable = "--" + field.replace("_", "-"), "MLA_ROUTER_" + field.upper()
    with pytest.raises(ConfigError, match=flag + fault):
        flags.from_namespace(parsed(flag, value))
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable + fault):
        flags.from_namespace(parsed())


def test_the_key_of_a_flag_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_ROUTER_API_KEY", "sesame")
    assert flags.from_namespace(parsed()).api_key == "sesame"
    assert flags.from_namespace(parsed("--api-key", "oats")).api_key == "oats"


def test_a_whole_prompt_in_a_step_is_limited_by_the_step() -> None:
    assert WorkerConfig(chunked_prefill_size=-1, max_prefill_tokens=4096).chunk_size == 4096
    assert WorkerConfig(chunked_prefill_size=64).chunk_size == 64


def test_a_worker_starts_with_one_line_and_logs_requests() -> None:
    at = USUAL.index("--device")
    without_gpu = [*USUAL[:at], *USUAL[at + 2 :]]
    with fake_worker(extra=[*without_gpu, "--host", "0.0.0.0"]) as worker:
        body = {"model": "deepseek", "prompt": [1, 2], "max_tokens": 2}
        post_json(f"{worker.url}/v1/completions", body)
        output = worker.running.output()
    (line,) = [line for line in output.splitlines() if "without effect here: " in line]
    assert "--enable-metrics (/metrics is always there)" in line
    assert " WARN without a key, every client that can reach 0.0.0.0 can use this worker" in output
    assert " INFO request " in output
    assert " /v1/completions 200 " in output
