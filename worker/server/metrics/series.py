"""Prometheus counters and histograms that sum over all API processes of a worker.

The library's own multi-process mode writes a file for each process and takes two locks for each value. This is too
slow for values that are recorded for each token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from mla_router.worker.server.ipc.shared_counters import SharedCounters


class Counter:
    """A counter with one value for each series. A series is a tuple of label values."""

    def __init__(
        self,
        counters: SharedCounters,
        name: str,
        help: str,
        labels: Sequence[str],
        series: Sequence[Sequence[str]],
    ) -> None:
        self._name, self._help, self._labels, self._series = name, help, labels, series
        self.counts = [counters.count() for _ in series]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, count in zip(self._series, self.counts, strict=True):
            family.add_metric(values, count.total)
        yield family


class Histogram:
    """A histogram with one series."""

    def __init__(
        self,
        counters: SharedCounters,
        name: str,
        help: str,
        model_name: str,
        buckets: tuple[float, ...],
    ) -> None:
        """`buckets` are the inclusive upper bounds, ascending. There is one more bucket above them."""
        self._name, self._help, self._model_name = name, help, model_name
        self._bounds = buckets
        self._cells = counters.cells(len(buckets) + 2)  # the last cell is the sum of the values
        self._own = self._cells.own

    def observe(self, value: float) -> None:
        self._own[bisect_left(self._bounds, value)] += 1
        self._own[-1] += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        *counts, total = self._cells.totals()
        bounds = map(floatToGoString, (*self._bounds, float("inf")))
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric([self._model_name], buckets, total)
        yield family
