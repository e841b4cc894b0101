"""What /metrics shows, under the names that SGLang's dashboards look for.

Numbers that the scheduler counts are read from its last heartbeat when somebody scrapes; the rest
is counted here. All label values come from the configuration or from closed sets, so a client
cannot make series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mla_router.worker.messages import Ready, Stats

SECONDS_TO_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
SECONDS_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)
SECONDS_IN_ALL = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)


class Metrics:
    def __init__(self, model_name: str, reading: Callable[[], Reading | None]) -> None:
        """`reading` gives the scheduler's last word; None before there is one."""
        self._registry = CollectorRegistry()
        self._registry.register(_SchedulerCollector(model_name, reading))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, help, ["model_name"], registry=self._registry, buckets=buckets)
            return family.labels(model_name)

        def counter(name: str, help: str) -> Counter:
            return Counter(name, help, ["model_name"], registry=self._registry).labels(model_name)

        self.requests = counter("sglang:num_requests", "Prompts accepted.")
        self.aborted = counter("sglang:num_aborted_requests", "Prompts that ended early.")
        self.time_to_first_token = histogram(
            "sglang:time_to_first_token_seconds", "From request to first token.", SECONDS_TO_FIRST
        )
        self.inter_token_latency = histogram(
            "sglang:inter_token_latency_seconds", "Between two tokens.", SECONDS_BETWEEN
        )
        self.e2e_latency = histogram(
            "sglang:e2e_request_latency_seconds", "From request to last token.", SECONDS_IN_ALL
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)


class Reading:
    """The scheduler's numbers at one moment."""

    __slots__ = ("limits", "open_requests", "stats", "throughput")

    def __init__(self, limits: Ready, stats: Stats, throughput: float, open_requests: int) -> None:
        self.limits = limits
        self.stats = stats
        self.throughput = throughput
        self.open_requests = open_requests

    @property
    def used_tokens(self) -> int:
        """Tokens' worth of pages that running requests hold."""
        stats = self.stats
        pages = stats.total_pages - stats.free_pages - stats.cached_pages
        return pages * self.limits.page_size

    @property
    def cache_hit_rate(self) -> float:
        return self.stats.cached_tokens / max(1, self.stats.prompt_tokens)


class _SchedulerCollector:
    def __init__(self, model_name: str, reading: Callable[[], Reading | None]) -> None:
        self._model_name = model_name
        self._reading = reading

    def describe(self) -> list[Metric]:
        return []  # there may be nothing to read yet when the registry asks

    def collect(self) -> Iterator[Metric]:
        reading = self._reading()
        if reading is None:
            return
        stats = reading.stats
        capacity = reading.limits.max_total_num_tokens
        for name, meaning, value in (
            ("num_running_reqs", "Requests in the batch.", stats.running),
            ("num_queue_reqs", "Requests waiting for a place.", stats.waiting),
            ("num_used_tokens", "KV cache tokens held by requests.", reading.used_tokens),
            ("token_usage", "Share of the KV cache held.", reading.used_tokens / capacity),
            ("max_total_num_tokens", "KV cache size in tokens.", capacity),
            ("cache_hit_rate", "Share of prompt tokens found cached.", reading.cache_hit_rate),
            ("gen_throughput", "Generated tokens a second.", reading.throughput),
        ):
            yield self._add(
                GaugeMetricFamily(f"sglang:{name}", meaning, labels=["model_name"]), value
            )
        for name, meaning, value in (
            ("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("cached_tokens", "Prompt tokens found cached.", stats.cached_tokens),
            ("generation_tokens", "Tokens generated.", stats.generated_tokens),
        ):
            yield self._add(
                CounterMetricFamily(f"sglang:{name}", meaning, labels=["model_name"]), value
            )

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._model_name], value)
        return family
