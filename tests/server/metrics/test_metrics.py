"""/metrics: values, names and documentation."""

from __future__ import annotations

import asyncio
import os
import random
import urllib.error
import urllib.request
from collections.abc import Iterator

import aiohttp
import msgspec
import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.parser import text_string_to_metric_families

from mla_router.worker.messages import Ready, Stats
from mla_router.worker.server.ipc.shared_counters import SharedCounters
from mla_router.worker.server.metrics.metrics import SECONDS_BETWEEN, VLLM_NAMES, Metrics
from mla_router.worker.server.metrics.scheduler_collector import Reading
from mla_router.worker.server.metrics.series import Histogram
from support.client import sse_events
from support.fake_worker import FakeWorker, script
from support.processes import ROOT, get_json, post_json, wait_until

DOCS = ROOT / "docs" / "worker_metrics.md"
STATS = Stats(
    query=0,
    running=3,
    waiting=2,
    total_pages=100,
    free_pages=60,
    cached_pages=15,
    total_slots=8,
    free_slots=5,
    steps=7,
    prompt_tokens=400,
    cached_tokens=100,
    generated_tokens=50,
    retracted=6,
    expert_balancedness=0.75,
    draft_steps=20,
    draft_tokens=60,
    accepted_tokens=30,
    step_seconds=2.5,
    wait_seconds=1.5,
)
READY = Ready(1600, 16, 8, 1024, 4096, "cpu", "float32", "float32", "torch")


def families(text: bytes) -> Iterator[Metric]:
    return iter(text_string_to_metric_families(text.decode()))


def values(text: bytes) -> dict[str, float]:
    """Returns the values of all samples except buckets."""
    return {
        sample.name + sample.labels.get("finished_reason", ""): sample.value
        for family in families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_metrics_of_the_scheduler() -> None:
    got = values(
        Metrics("m", lambda: Reading(READY, STATS, 12.5), SharedCounters.create()).render()
    )
    assert got["sglang:num_running_reqs"] == 3
    assert got["sglang:num_queue_reqs"] == 2
    assert got["sglang:num_used_tokens"] == (100 - 60 - 15) * 16
    assert got["sglang:token_usage"] == 25 * 16 / 1600
    assert got["sglang:max_total_num_tokens"] == 1600
    assert got["sglang:cache_hit_rate"] == 0.25
    assert got["sglang:spec_accept_length"] == 1 + 30 / 20
    assert got["sglang:spec_accept_rate"] == 0.5
    assert got["vllm:spec_decode_num_drafts_total"] == 20
    assert got["vllm:spec_decode_num_draft_tokens_total"] == 60
    assert got["vllm:spec_decode_num_accepted_tokens_total"] == 30
    assert got["sglang:gen_throughput"] == 12.5
    assert got["sglang:prompt_tokens_total"] == got["vllm:prefix_cache_queries_total"] == 400
    assert got["sglang:cached_tokens_total"] == 100
    assert got["sglang:generation_tokens_total"] == 50
    assert got["sglang:num_retracted_requests_total"] == got["sglang:num_retracted_reqs"] == 6
    assert got["sglang:eplb_balancedness"] == 0.75
    assert got["mla_worker_step_seconds_total"] == 2.5
    assert got["mla_worker_wait_seconds_total"] == 1.5


def test_an_unknown_balancedness_is_left_out() -> None:
    stats = msgspec.structs.replace(STATS, expert_balancedness=0.0)
    rendered = Metrics("m", lambda: Reading(READY, stats, 0.0), SharedCounters.create()).render()
    assert b"eplb" not in rendered


def test_nothing_is_said_of_a_scheduler_that_has_said_nothing() -> None:
    got = values(Metrics("m", lambda: None, SharedCounters.create()).render())
    assert "sglang:num_running_reqs" not in got
    assert got["sglang:num_requests_total"] == 0


def test_both_names_show_the_same() -> None:
    metrics = Metrics("m", lambda: Reading(READY, STATS, 1.0), SharedCounters.create())
    metrics.ended("stop", 1.0, 10, 20)
    metrics.time_to_first_token.observe(0.3)
    found = {family.name: family for family in families(metrics.render())}
    assert len(VLLM_NAMES) > 10
    for ours, theirs in VLLM_NAMES.items():
        one, other = found[ours], found[theirs]
        assert one.type == other.type
        assert [
            (sample.name.removeprefix(ours), sample.labels, sample.value) for sample in one.samples
        ] == [
            (sample.name.removeprefix(theirs), sample.labels, sample.value)
            for sample in other.samples
        ]


def test_how_answers_end(worker: FakeWorker) -> None:
    """Each end counts once. Only complete answers count for latency."""

    def read() -> dict[str, float]:
        with urllib.request.urlopen(worker.url + "/metrics") as response:
            return values(response.read())

    def ask(salt: str = "", limit: int = 5) -> None:
        params = {"max_new_tokens": limit}
        body = {"text": "a", "sampling_params": params, "cache_salt": salt, "rid": "counted"}
        post_json(worker.url + "/generate", body)

    async def ask_and_leave() -> None:
        body = {"text": "a", "stream": True, "cache_salt": script(hold_after=1)}
        async with (
            aiohttp.ClientSession() as http,
            http.post(worker.url + "/generate", json=body) as response,
        ):
            await anext(sse_events(response))

    get_json(worker.url + "/get_server_info")  # updates the scheduler's counters
    before = read()

    def grown(name: str) -> float:
        return read()[name] - before[name]

    ask()
    ask(script(say=[5, 1]))  # 1 is EOS
    with pytest.raises(urllib.error.HTTPError):
        ask(script(error="broken"))
    asyncio.run(ask_and_leave())
    wait_until(lambda: grown("sglang:num_aborted_requests_total") == 1, "the abort counts")
    assert grown("sglang:num_requests_total") == 4
    for reason in ("length", "stop", "error", "abort"):
        assert grown(f"vllm:request_success_total{reason}") == 1, reason
    assert grown("sglang:e2e_request_latency_seconds_count") == 2
    assert grown("sglang:generation_tokens_histogram_sum") == 5 + 2
    assert grown("sglang:time_to_first_token_seconds_count") == 3
    assert grown("sglang:queue_time_seconds_count") == 3
    wait_until(  # the scheduler's counters arrive with its heartbeat
        lambda: grown("sglang:generation_tokens_total") == 5 + 2 + 1, "the tokens are counted"
    )


def documented() -> str:
    metrics = Metrics("m", lambda: Reading(READY, STATS, 1.0), SharedCounters.create())
    found = {family.name: family for family in families(metrics.render())}
    lines = []
    for name, family in found.items():
        if name in VLLM_NAMES.values():
            continue
        suffix = "_total" if family.type == "counter" else ""
        other = f"`{VLLM_NAMES[name]}{suffix}`" if name in VLLM_NAMES else ""
        lines.append(f"| `{name}{suffix}` | {other} | {family.type} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def test_every_metric_is_documented() -> None:
    """With UPDATE_DOCS=1 in the environment the test writes the table."""
    text = DOCS.read_text()
    head = text[: text.index("|---|") + text[text.index("|---|") :].index("\n") + 1]
    if os.environ.get("UPDATE_DOCS") == "1":
        DOCS.write_text(head + documented())
    assert DOCS.read_text() == head + documented()


def test_a_histogram_counts_as_the_library_does() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    library = LibraryHistogram("a", "b", ["model_name"], registry=theirs, buckets=SECONDS_BETWEEN)
    histogram = Histogram(SharedCounters.create(), "a", "b", "m", SECONDS_BETWEEN)
    ours.register(histogram)
    rng = random.Random(0)
    for value in [*SECONDS_BETWEEN, 0.0, 7.0, *(rng.expovariate(20) for _ in range(1000))]:
        library.labels("m").observe(value)
        histogram.observe(value)

    def lines(registry: CollectorRegistry) -> list[str]:
        shown = generate_latest(registry).decode().splitlines()
        return [line for line in shown if "a_created" not in line]

    assert lines(ours) == lines(theirs)
