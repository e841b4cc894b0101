"""The metrics of a worker, under the names of SGLang and vLLM, so that their dashboards work.

The scheduler's numbers come from its last statistics. The others are counted here, over all API processes of the
worker. All label values come from the configuration or from closed sets: clients cannot create series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from mla_router.worker.generation import FinishReason
from mla_router.worker.messages import Ready, Stats
from mla_router.worker.server.ipc.shared_counters import Count, SharedCounters
from mla_router.worker.server.metrics.series import Counter, Histogram

SECONDS_QUEUED = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 60, 120)
SECONDS_TO_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
SECONDS_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)
SECONDS_IN_ALL = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
TOKENS = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000)

# vLLM has a metric with the same meaning: each of these is exported under both names.
VLLM_NAMES = {
    "sglang:num_running_reqs": "vllm:num_requests_running",
    "sglang:num_queue_reqs": "vllm:num_requests_waiting",
    "sglang:token_usage": "vllm:kv_cache_usage_perc",
    "sglang:prompt_tokens": "vllm:prompt_tokens",
    "sglang:generation_tokens": "vllm:generation_tokens",
    "sglang:cached_tokens": "vllm:prefix_cache_hits",
    "sglang:num_retracted_requests": "vllm:num_preemptions",
    "sglang:queue_time_seconds": "vllm:request_queue_time_seconds",
    "sglang:prompt_tokens_histogram": "vllm:request_prompt_tokens",
    "sglang:generation_tokens_histogram": "vllm:request_generation_tokens",
    "sglang:time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "sglang:inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "sglang:e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
}
COMPLETE = (FinishReason.STOP.value, FinishReason.LENGTH.value)
FINISH_REASONS = tuple(reason.value for reason in FinishReason)


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


class Metrics:
    def __init__(
        self,
        model_name: str,
        reading: Callable[[], Reading | None],
        counters: SharedCounters,
        dp_rank: int | None = None,
    ) -> None:
        """`reading` returns the scheduler's last statistics, or None before the first ones. `dp_rank`: a further label, if
        it is not None."""
        self._labels = {} if dp_rank is None else {"dp_rank": str(dp_rank)}
        self._registry = CollectorRegistry()
        self._registry.register(_SchedulerCollector(model_name, reading))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(counters, name, help, model_name, buckets)
            self._registry.register(made)
            return made

        def counter(name: str, help: str) -> Count:
            made = Counter(counters, name, help, ["model_name"], [[model_name]])
            self._registry.register(made)
            return made.counts[0]

        self.requests = counter("sglang:num_requests", "Answers that began.")
        self._aborted = counter(
            "sglang:num_aborted_requests",
            "Aborted answers, mostly of clients that left.",
        )
        ends = Counter(
            counters,
            "vllm:request_success",
            "Answers by the reason of their end.",
            ["model_name", "finished_reason"],
            [[model_name, reason] for reason in FINISH_REASONS],
        )
        self._registry.register(ends)
        self._ends = dict(zip(FINISH_REASONS, ends.counts, strict=True))
        self._prompt_tokens = histogram(
            "sglang:prompt_tokens_histogram", "Prompt tokens of an answer.", TOKENS
        )
        self._generated_tokens = histogram(
            "sglang:generation_tokens_histogram", "Generated tokens of an answer.", TOKENS
        )
        self.queue_time = histogram(
            "sglang:queue_time_seconds",
            "Time from arrival to the first admission.",
            SECONDS_QUEUED,
        )
        self.time_to_first_token = histogram(
            "sglang:time_to_first_token_seconds",
            "Time from the request to the first token.",
            SECONDS_TO_FIRST,
        )
        self.inter_token_latency = histogram(
            "sglang:inter_token_latency_seconds", "Time between two tokens.", SECONDS_BETWEEN
        )
        self._e2e_latency = histogram(
            "sglang:e2e_request_latency_seconds",
            "Time from the request to the last token.",
            SECONDS_IN_ALL,
        )

    def ended(self, reason: str, seconds: float, prompt_tokens: int, generated: int) -> None:
        """Counts the end of an answer. `reason` is one of `FINISH_REASONS`. Sizes and times count only for complete
        answers."""
        self._ends[reason].inc()
        if reason == FinishReason.ABORT.value:
            self._aborted.inc()
        if reason not in COMPLETE:
            return
        self._e2e_latency.observe(seconds)
        self._prompt_tokens.observe(prompt_tokens)
        self._generated_tokens.observe(generated)

    def render(self) -> bytes:
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield _under(family.name, family, self._labels)
            if (name := VLLM_NAMES.get(family.name)) is not None:
                yield _under(name, family, self._labels)


class _SchedulerCollector:
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


def _under(name: str, family: Metric, labels: Mapping[str, str]) -> Metric:
    """Returns `family` under `name`, with further `labels`, and without the `_created` samples of the library."""
    copy = Metric(name, family.documentation, family.type, family.unit)
    copy.samples = [
        Sample(
            name + sample.name.removeprefix(family.name), {**sample.labels, **labels}, *sample[2:]
        )
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return copy
