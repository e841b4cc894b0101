"""The benchmark client with the mock engine, whose times and counts are known."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bench_serving
from loadgen import arguments, crowd
from loadgen.server import ServerError
from loadgen.tokens import Prompt
from loadgen.workload import Turn
from support.mock_engine import MockEngine, mock_engine
from support.processes import ROOT

SMALL_MODEL = ROOT / "worker/model/small"
REQUESTS = 12


@pytest.fixture
def engine() -> Iterator[MockEngine]:
    with mock_engine() as engine:
        yield engine


def words(engine: MockEngine, *more: str) -> list[str]:
    """A short run. No other requests are sent, so the results can be compared with the counts of the mock engine."""
    common = [f"--base-url={engine.url}", f"--tokenizer={SMALL_MODEL}", f"--num-prompts={REQUESTS}"]
    common += ["--warmup-requests=0", "--random-input-len=64", "--random-output-len=8"]
    return [*common, "--disable-tqdm", *more]


def measure(engine: MockEngine, *more: str) -> dict[str, Any]:
    return asyncio.run(bench_serving.measure(arguments.parse("", words(engine, *more))))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("backend", ["sglang-oai", "sglang-oai-chat", "sglang"])
def test_counts_are_the_engines(engine: MockEngine, backend: str, stream: bool) -> None:
    flags = [] if stream else ["--disable-stream"]
    shared = ["--dataset-name=generated-shared-prefix", "--gsp-num-groups=2"]
    shared += ["--gsp-prompts-per-group=8", "--gsp-system-prompt-len=64", "--gsp-question-len=16"]
    # One after the other, so that the cached tokens do not depend on the order of arrival.
    flags += [*shared, "--gsp-output-len=5", "--max-concurrency=1"]
    result = measure(engine, f"--backend={backend}", *flags)
    stats = engine.stats()
    assert (result["completed"], result["failed"]) == (16, 0) == (stats["requests"], 0)
    assert result["total_input_tokens"] == stats["prompt_tokens"]
    assert result["total_output_tokens"] == stats["completion_tokens"] == 16 * 5
    assert result["cached_tokens"] == stats["cached_tokens"] > 0
    assert result["cached_share"] == stats["cached_tokens"] / stats["prompt_tokens"]
    assert result["other_length_than_asked"] == 0
    assert ("mean_ttft_ms" in result) == stream


def test_several_processes_share_the_requests(engine: MockEngine) -> None:
    shared = ["--dataset-name=multi-turn", "--multi-turn-rounds=2", "--num-prompts=5"]
    result = measure(engine, *shared, "--client-processes=3", "--max-concurrency=4")
    stats = engine.stats()
    assert (result["completed"], result["failed"]) == (10, 0) == (stats["requests"], 0)
    assert result["total_output_tokens"] == stats["completion_tokens"] == 10 * 128
    assert [turn["completed"] for turn in result["turns"]] == [5, 5]
    assert 0 < result["client_cpu_share"] < 3


def test_no_process_is_without_a_place() -> None:
    turns = [(Turn(Prompt("x", [1]), 1),)] * 7
    target = crowd.Target("http://nowhere", "sglang", None, 1.0)  # type: ignore[arg-type]
    loads = crowd.share_out(target, turns, [0.1 * i for i in range(7)], 5, 3)
    assert [len(load.conversations) for load in loads] == [3, 2, 2]
    assert sum(load.max_concurrency or 0 for load in loads) == 5
    assert loads[1].due == [0.1 * 1, 0.1 * 4]
    assert [len(load.due) for load in crowd.share_out(target, turns, [0.0] * 7, 2, 9)] == [4, 3]


def test_a_process_that_dies_is_no_endless_wait(engine: MockEngine) -> None:
    target = crowd.Target(engine.url, "no such backend", None, 1.0)  # type: ignore[arg-type]
    turns = [(Turn(Prompt("x", [1]), 1),)] * 2
    with pytest.raises(crowd.ClientError, match="died"):
        crowd.run(crowd.share_out(target, turns, [0.0] * 2, None, 2), lambda _: None)


def test_lengths_are_drawn_between_their_bounds(engine: MockEngine) -> None:
    result = measure(engine, "--tokenize-prompt", "--random-range-ratio=1")
    assert result["total_input_tokens"] == REQUESTS * 64  # token ids: the engine's count is exact
    assert result["total_output_tokens"] == REQUESTS * 8


def test_times_equal_those_of_the_mock_engine() -> None:
    """The sum is at most the elapsed time: a busy machine only adds to the times."""
    step_ms, output, requests = 50.0, 9, 5
    with mock_engine(prefill_rate=1000, decode_base_ms=step_ms) as engine:
        begun = time.monotonic()
        lengths = ["--random-input-len=400", f"--random-output-len={output}"]
        flags = [*lengths, "--random-range-ratio=1", f"--num-prompts={requests}"]
        result = measure(engine, "--tokenize-prompt", "--max-concurrency=1", *flags)
        assert result["duration"] <= time.monotonic() - begun
    prefill_ms = 400.0
    assert prefill_ms <= result["median_ttft_ms"]
    # Time beyond the engine's own until the first token also delays the other tokens.
    late_ms = result["max_ttft_ms"] - prefill_ms
    assert result["median_tpot_ms"] >= 0.9 * step_ms - late_ms / (output - 1)
    assert result["mean_itl_ms"] >= 0.9 * step_ms - late_ms / (output - 1)
    whole = result["mean_ttft_ms"] + (output - 1) * result["mean_tpot_ms"]
    assert result["mean_e2e_latency_ms"] == pytest.approx(whole)
    assert requests * result["mean_e2e_latency_ms"] <= result["duration"] * 1e3
    assert result["concurrency"] == pytest.approx(
        requests * result["mean_e2e_latency_ms"] / 1e3 / result["duration"]
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"kind": "status", "status": 503}, "HTTP 503: told to refuse"),
        ({"kind": "break", "after_tokens": 2}, "ClientPayloadError"),
        ({"kind": "no_done"}, "without [DONE]"),
        ({"kind": "engine_died", "after_tokens": 2}, "The engine has died"),
        ({"kind": "garbage", "form": "truncated"}, "BadAnswer"),
        ({"kind": "garbage", "form": "html"}, "BadAnswer"),
        ({"kind": "hang"}, "no answer in time"),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_failures_are_reported(engine: MockEngine, fault: dict[str, Any], said: str) -> None:
    engine.fault(**fault, count=3)
    timeout = 5.0 if fault["kind"] == "hang" else 600.0
    result = measure(engine, f"--request-timeout={timeout}", "--random-range-ratio=1")
    assert (result["completed"], result["failed"]) == (REQUESTS - 3, 3)
    ((error, count),) = result["errors"].items()
    assert said in error
    assert count == 3
    assert result["total_output_tokens"] == (REQUESTS - 3) * 8


def test_a_turn_that_cannot_be_sent_is_reported(engine: MockEngine) -> None:
    engine.fault(kind="status", status=500, count=1)
    conversations = ["--dataset-name=multi-turn", "--num-prompts=2", "--multi-turn-rounds=3"]
    result = measure(engine, *conversations, "--max-concurrency=1")
    assert (result["completed"], result["failed"]) == (3, 3)
    assert [row["completed"] for row in result["turns"]] == [1, 1, 1]
    assert sum("not sent" in error for error in result["errors"]) == 1


def test_conversations_find_their_beginning_cached(engine: MockEngine) -> None:
    """The mock engine caches the tokens of its answer. They are found if the client sends the answer back."""
    conversations = ["--dataset-name=multi-turn", "--num-prompts=3", "--multi-turn-rounds=4"]
    result = measure(engine, *conversations, "--max-concurrency=1")
    stats = engine.stats()
    assert result["completed"] == 12 == stats["requests"]
    assert result["total_input_tokens"] == stats["prompt_tokens"]
    shares = [row["cached_share"] for row in result["turns"]]
    assert result["turns"][0]["completed"] == 3
    assert min(shares[1:]) > 0.5


def test_the_command_ends_with_a_json_line(engine: MockEngine, tmp_path: Path) -> None:
    engine.fault(kind="status", status=500, count=1)
    out = tmp_path / "results.jsonl"
    script = ROOT / "bench/serving/bench_serving.py"
    done = subprocess.run(
        [sys.executable, str(script), *words(engine, f"--output-file={out}")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr  # a request has failed
    assert "1 x failed: HTTP 500: told to refuse" in done.stdout
    assert f"Successful requests:                     {REQUESTS - 1}\n" in done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(out.read_text())
    assert (result["bench"], result["completed"]) == ("bench_serving", REQUESTS - 1)
    assert "--output-file" not in result["command"]


def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(ServerError, match="/v1/models"):
        measure(MockEngine("http://127.0.0.1:9"))
