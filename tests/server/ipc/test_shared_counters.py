"""Counters of several processes, which share only a descriptor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mla_router.worker.server.ipc.shared_counters import ROW_BYTES, SharedCounters
from mla_router.worker.server.metrics.metrics import Metrics
from support.processes import ROOT

OTHER = """
import sys
from mla_router.worker.server.ipc.shared_counters import SharedCounters
counters = SharedCounters(int(sys.argv[1]), 3, int(sys.argv[2]))
before, count, cells = counters.count(), counters.count(), counters.cells(2)
for _ in range(100_000):
    count.inc()
cells.own[1] = 0.5
"""


def test_counts_of_other_processes_are_visible() -> None:
    counters = SharedCounters.create(3)
    before, count, cells = counters.count(), counters.count(), counters.cells(2)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    descriptor = counters.descriptor
    others = [
        subprocess.Popen(
            [sys.executable, "-c", OTHER, str(descriptor), str(row)],
            pass_fds=(descriptor,),
            env=environment,
        )
        for row in (1, 2)
    ]
    for _ in range(100_000):
        count.inc()
    cells.own[1] = 7.0
    assert [other.wait() for other in others] == [0, 0]
    assert count.total == 300_000
    assert cells.totals() == [0.0, 8.0]
    assert before.total == 0
    count.set(5)
    assert count.total == 200_005, "only our own is replaced"


def test_a_row_is_not_left() -> None:
    counters = SharedCounters.create(2)
    counters.cells(ROW_BYTES // 8)
    with pytest.raises(AssertionError):
        counters.count()


def test_metrics_of_two_processes_add_up() -> None:
    counters = SharedCounters.create(2)
    one = Metrics("m", lambda: None, counters)
    other = Metrics("m", lambda: None, SharedCounters(counters.descriptor, 2, 1))
    one.requests.inc()
    other.requests.inc()
    one.ended("stop", 0.3, 10, 20)
    other.ended("stop", 3.0, 30, 5)
    other.ended("abort", 3.0, 30, 5)
    assert one.render() == other.render()
    got = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(one.render().decode())
        for sample in family.samples
    }
    assert got["sglang:num_requests_total", "m"] == 2
    assert got["vllm:request_success_total", "m", "stop"] == 2
    assert got["vllm:request_success_total", "abort", "m"] == 1
    assert got["sglang:e2e_request_latency_seconds_sum", "m"] == pytest.approx(3.3)
    assert got["sglang:e2e_request_latency_seconds_bucket", "0.5", "m"] == 1
    assert got["sglang:e2e_request_latency_seconds_bucket", "+Inf", "m"] == 2
    assert got["sglang:prompt_tokens_histogram_sum", "m"] == 40
