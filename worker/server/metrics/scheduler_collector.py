"""The metrics that the scheduler's last statistics give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mla_router.worker.messages import Ready, Stats


@dataclass(frozen=True, slots=True)
class Reading:
    """The last statistics of the scheduler."""

    limits: Ready
    stats: Stats
    throughput: float

    @property
    def used_tokens(self) -> int:
        """The capacity, in tokens, of the pages that running requests own."""
        stats = self.stats
        pages = stats.total_pages - stats.free_pages - stats.cached_pages
        return pages * self.limits.page_size

    @property
    def token_usage(self) -> float:
        return self.used_tokens / self.limits.max_total_num_tokens

    @property
    def cache_hit_rate(self) -> float:
        return self.stats.cached_tokens / max(1, self.stats.prompt_tokens)


class SchedulerCollector:
    def __init__(self, model_name: str, reading: Callable[[], Reading | None]) -> None:
        self._model_name = model_name
        self._reading = reading

    def describe(self) -> list[Metric]:
        return []  # the registry asks before the first statistics

    def collect(self) -> Iterator[Metric]:
        reading = self._reading()
        if reading is None:
            return
        for name, meaning, value in _gauges(reading):
            if value is not None:
                yield self._add(GaugeMetricFamily(name, meaning, labels=["model_name"]), value)
        for name, meaning, count in _counters(reading.stats):
            yield self._add(CounterMetricFamily(name, meaning, labels=["model_name"]), count)

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._model_name], value)
        return family


def _gauges(reading: Reading) -> tuple[tuple[str, str, float | None], ...]:
    """Returns name, meaning and value of each gauge; None: there is no value."""
    stats = reading.stats
    return (
        ("sglang:num_running_reqs", "Running requests.", stats.running),
        ("sglang:num_queue_reqs", "Waiting requests.", stats.waiting),
        (
            "sglang:num_grammar_queue_reqs",
            "Requests waiting for their grammar.",
            stats.compiling,
        ),
        ("sglang:num_used_tokens", "KV cache tokens of running requests.", reading.used_tokens),
        ("sglang:token_usage", "Used share of the KV cache, 0 to 1.", reading.token_usage),
        (
            "sglang:max_total_num_tokens",
            "KV cache size in tokens.",
            reading.limits.max_total_num_tokens,
        ),
        (
            "sglang:cache_hit_rate",
            "Share of prompt tokens found cached, since the start.",
            reading.cache_hit_rate,
        ),
        (
            "sglang:gen_throughput",
            "Generated tokens per second, over about half a second.",
            reading.throughput,
        ),
        (
            "sglang:num_retracted_reqs",
            "Older name of sglang:num_retracted_requests_total.",
            stats.retracted,
        ),
        (
            "sglang:eplb_balancedness",
            "Mean load of a rank's experts over the largest, over about half a second, averaged over layers.",
            stats.expert_balancedness or None,
        ),
        (
            "sglang:spec_accept_length",
            "Tokens of a request in a step with drafts, since the start.",
            stats.accept_length or None,
        ),
        (
            "sglang:spec_accept_rate",
            "Share of drafts that were accepted, since the start; of a tree all nodes after the root are drafts.",
            stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else None,
        ),
    )


def _counters(stats: Stats) -> tuple[tuple[str, str, float], ...]:
    """Returns name, meaning and value of each counter."""
    return (
        ("sglang:prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
        ("sglang:cached_tokens", "Prompt tokens found cached.", stats.cached_tokens),
        (
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.prompt_tokens,
        ),
        ("sglang:generation_tokens", "Tokens generated.", stats.generated_tokens),
        (
            "sglang:num_retracted_requests",
            "Retractions of running requests for lack of memory.",
            stats.retracted,
        ),
        (
            "vllm:spec_decode_num_drafts",
            "Decode steps of requests with drafts.",
            stats.draft_steps,
        ),
        (
            "vllm:spec_decode_num_draft_tokens",
            "Drafts that were verified; of a tree all nodes after the root.",
            stats.draft_tokens,
        ),
        (
            "vllm:spec_decode_num_accepted_tokens",
            "Drafts that were accepted.",
            stats.accepted_tokens,
        ),
        ("mla_worker_step_seconds", "Time of all steps.", stats.step_seconds),
        (
            "mla_worker_wait_seconds",
            "Part of it in which the scheduler waited for the device: near 0, a GPU waits for the host.",
            stats.wait_seconds,
        ),
    )
