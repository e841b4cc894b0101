"""The metrics of a worker, under the names of SGLang and vLLM, so that their dashboards work.

Those of answers are counted here, over all API processes of the worker; those of the scheduler are in
`scheduler_collector.py`. All label values come from the configuration or from closed sets: clients cannot create series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from mla_router.worker.generation import FinishReason
from mla_router.worker.server.ipc.shared_counters import Count, SharedCounters
from mla_router.worker.server.metrics.scheduler_collector import Reading, SchedulerCollector
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
        self._registry.register(SchedulerCollector(model_name, reading))

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
