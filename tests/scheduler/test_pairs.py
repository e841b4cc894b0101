"""Pairs of features: they change the order of the computation, but never the output."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import msgspec
import pytest

from mla_router.worker.messages import Abort, FlushCache, Generate, ToScheduler
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import StepPlan
from support.dp_schedulers import other_dp_rank
from support.fake_engine import continuation, logprob
from support.faulty_engine import FaultyEngine
from support.forcing_grammars import FORCING, ForcingGrammars, forced_continuation
from support.scripted_scheduler import Run, assert_nothing_is_allocated, generate, run

SHARED = [i % 50 for i in range(36)]


@dataclass
class Scenario:
    """Eight requests with a long common prefix, of which two arrive late. Features change the scenario."""

    requests: list[Generate] = field(
        default_factory=lambda: [
            generate(f"r{i}", [*SHARED, i, i + 1], 16, seed=i) for i in range(8)
        ]
    )
    arrivals: list[int] = field(default_factory=lambda: [0, 0, 0, 3, 3, 5, 40, 40])
    others: dict[int, ToScheduler] = field(default_factory=dict)
    capacity: Capacity = field(default_factory=lambda: Capacity(128, 4, 8, 80))
    settings: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)
    has_dp_ranks: bool = False

    def set(self, rid: int, **changes: Any) -> None:
        request = self.requests[rid]
        own = {k: v for k, v in changes.items() if k in Generate.__struct_fields__}
        sampling = msgspec.structs.replace(
            request.sampling, **{k: v for k, v in changes.items() if k not in own}
        )
        self.requests[rid] = msgspec.structs.replace(request, sampling=sampling, **own)

    def expected(self, rid: int) -> list[int]:
        request = self.requests[rid]
        known = [*request.prompt, *request.output]
        left = request.sampling.max_tokens - len(request.output)
        seed, stops = request.sampling.seed, request.sampling.stop_token_ids
        if request.grammar is not None:
            return forced_continuation(request.prompt, left, seed, stops, request.output)
        return continuation(known, left, seed, stops)

    def play(self, *, overlap: bool) -> tuple[Run, list[StepPlan]]:
        engine = FaultyEngine(self.capacity, **self.faults)
        grammars: Any = ForcingGrammars()
        script: dict[int, list[ToScheduler]] = {}
        for at, request in zip(self.arrivals, self.requests, strict=True):
            script.setdefault(at, []).append(request)
        for at, message in self.others.items():
            script.setdefault(at, []).append(message)
        with other_dp_rank() if self.has_dp_ranks else nullcontext() as group:
            outcome = run(
                script,
                engine=engine,
                capacity=self.capacity,
                overlap=overlap,
                group=group,
                grammars=grammars,
                **{"chunk_size": 64, **self.settings},
            )
        return outcome, engine.plans


# -- the features: a change of the scenario, and a check that the feature was exercised --------------


def chunks(scenario: Scenario) -> None:
    scenario.settings |= {"chunk_size": 5, "max_prefill_tokens": 8}


def steps_of_one_kind(scenario: Scenario) -> None:
    scenario.settings["disable_mixed_chunk"] = True


def first_come_first_served(scenario: Scenario) -> None:
    scenario.capacity = replace(scenario.capacity, num_slots=3)
    scenario.settings["schedule_policy"] = "fcfs"


def no_prefix_cache(scenario: Scenario) -> None:
    scenario.settings["use_prefix_cache"] = False


def large_pages(scenario: Scenario) -> None:
    scenario.capacity = replace(
        scenario.capacity,
        num_pages=scenario.capacity.max_total_tokens // 16,
        page_size=16,
    )


def salts(scenario: Scenario) -> None:
    for i in (1, 4):
        scenario.set(i, cache_salt="other")


def little_memory(scenario: Scenario) -> None:
    size = scenario.capacity.page_size
    scenario.capacity = replace(scenario.capacity, num_pages=96 // size, num_slots=5)
    scenario.settings["schedule_conservativeness"] = 0.01
    for i in range(8):  # without a common prefix, so that each needs its own pages
        scenario.set(i, prompt=[(i + 2) * k % 50 for k in range(14 + i)], max_tokens=34)


def priorities(scenario: Scenario) -> None:
    scenario.capacity = replace(scenario.capacity, num_slots=2)
    scenario.settings["enable_priority_scheduling"] = True
    for i in (5, 7):
        scenario.set(i, priority=i)


def stop_tokens(scenario: Scenario) -> None:
    for i in (0, 3, 6):
        scenario.set(i, stop_token_ids=frozenset([scenario.expected(i)[6]]))


def aborts(scenario: Scenario) -> None:
    scenario.others |= {4: Abort("r1"), 9: Abort("r4"), 41: Abort("r7")}


def flushes(scenario: Scenario) -> None:
    scenario.others |= {1: FlushCache(1), 7: FlushCache(2), 39: FlushCache(3)}


def prompt_logprobs(scenario: Scenario) -> None:
    for i, first in ((0, 0), (2, 9), (6, 30)):
        scenario.set(i, prompt_logprobs_from=first)


def logprobs(scenario: Scenario) -> None:
    for i in (1, 2, 6):
        scenario.set(i, logprobs=True)


def continuations(scenario: Scenario) -> None:
    for i in (2, 5, 6):
        scenario.set(i, output=scenario.expected(i)[:5])


def rows_without_token(scenario: Scenario) -> None:
    scenario.faults["no_token"] = {(2, 0), (6, 1)}


def steps_that_fail(scenario: Scenario) -> None:
    scenario.faults |= {"fail_forward": {3}, "fail_sample": {9}, "fail_wait": {15}}


def dp_attention(scenario: Scenario) -> None:
    scenario.has_dp_ranks = True


def drafts(scenario: Scenario) -> None:
    scenario.capacity = replace(scenario.capacity, tokens_per_row=3)


def was_retracted(outcome: Run, _: list[StepPlan]) -> bool:
    return outcome.scheduler.stats().retracted > 0


def some_end(reason: str) -> Callable[[Run, list[StepPlan]], bool]:
    return lambda outcome, _: reason in {d.finish_reason for d in outcome.channel.all_deltas()}


def cached(outcome: Run, rid: str) -> int:
    return outcome.channel.deltas()[rid][0].cached_tokens


def grammars(scenario: Scenario) -> None:
    for i in (1, 2, 6):
        scenario.set(i, grammar=FORCING)


FEATURES: dict[Callable[[Scenario], None], Callable[[Run, list[StepPlan]], bool]] = {
    chunks: lambda _, plans: any(not c.is_last for plan in plans for c in plan.chunks),
    steps_of_one_kind: lambda _, plans: not any(p.chunks and p.decode_slots for p in plans),
    first_come_first_served: lambda o, _: list(o.channel.deltas()) == [f"r{i}" for i in range(8)],
    no_prefix_cache: lambda o, _: cached(o, "r7") == 0,
    large_pages: lambda o, _: cached(o, "r7") == 32,
    salts: lambda o, _: (cached(o, "r1"), cached(o, "r4"), cached(o, "r5")) == (0, 36, 36),
    little_memory: was_retracted,
    priorities: was_retracted,
    stop_tokens: some_end("stop"),
    aborts: some_end("abort"),
    flushes: lambda o, _: cached(o, "r6") == 0,
    prompt_logprobs: lambda o, _: o.channel.deltas()["r2"][0].prompt_logprobs is not None,
    logprobs: lambda o, _: o.channel.deltas()["r2"][0].logprobs is not None,
    grammars: lambda o, _: any(len(d.token_ids) > 3 for d in o.channel.deltas()["r2"]),
    continuations: lambda o, _: len(o.channel.tokens("r5")) == 11,
    rows_without_token: some_end("error"),
    steps_that_fail: some_end("error"),
    drafts: lambda o, _: o.scheduler.stats().accepted_tokens > 0,
    dp_attention: lambda _, plans: bool(plans[0].group and all(plans[0].group.rows)),
}


def check(scenario: Scenario, outcome: Run) -> None:
    for i, request in enumerate(scenario.requests):
        rid, expected = request.rid, scenario.expected(i)
        got, reason = outcome.channel.tokens(rid), outcome.channel.reason(rid)
        deltas = outcome.channel.deltas()[rid]
        if reason in ("stop", "length"):
            assert got == expected
        else:
            assert reason == "abort" or (reason == "error" and scenario.faults)
            assert got == expected[: len(got)]
        if got and (first := request.sampling.prompt_logprobs_from) is not None:
            logprobs, prompt = deltas[0].prompt_logprobs, request.prompt
            assert logprobs is not None
            assert logprobs.logprobs == [
                logprob(prompt[:k], prompt[k]) for k in range(max(1, first), len(prompt))
            ]
        if request.sampling.logprobs:
            told = [x for delta in deltas if delta.logprobs for x in delta.logprobs.logprobs]
            assert told == [-float(token) for token in got]
    assert_nothing_is_allocated(outcome)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_each_feature_is_exercised(feature: Callable[[Scenario], None], overlap: bool) -> None:
    scenario = Scenario()
    feature(scenario)
    outcome, plans = scenario.play(overlap=overlap)
    check(scenario, outcome)
    assert FEATURES[feature](outcome, plans)


@pytest.mark.parametrize(
    "pair", list(combinations(FEATURES, 2)), ids=lambda pair: "-".join(f.__name__ for f in pair)
)
def test_any_two_features(pair: tuple[Callable[[Scenario], None], ...]) -> None:
    scenario = Scenario()
    for feature in pair:
        feature(scenario)
    for overlap in (True, False):
        outcome, _ = scenario.play(overlap=overlap)
        check(scenario, outcome)
