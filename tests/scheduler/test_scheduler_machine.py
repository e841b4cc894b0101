"""Both loops of the scheduler side by side, under all events in any order.

A request's tokens always follow from its prompt and seed, and each is sent once. Pages and slots add up after every
turn. Without new requests, all requests finish.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mla_router.worker.config import WorkerConfig
from mla_router.worker.messages import Abort, FlushCache, Generate, ToScheduler
from mla_router.worker.step.engine import Capacity
from support.examples import examples
from support.fake_engine import VOCAB, continuation, logprob
from support.faulty_engine import FaultyEngine
from support.forcing_grammars import FORCING, forced_continuation
from support.scripted_scheduler import generate
from support.stepped_scheduler import SteppedScheduler

PREFIXES = [[(i * k + k) % VOCAB for i in range(30)] for k in (1, 3, 7)]
# Steps between two failures: several in a row would count as a lost device.
FAILURES_APART = 4


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        chunk_size=st.sampled_from([1, 5, 40]),
        step_tokens=st.sampled_from([6, 64]),
        num_slots=st.sampled_from([1, 3, 6]),
        mixed=st.booleans(),
        policy=st.sampled_from(["lpm", "fcfs"]),
        priorities=st.booleans(),
        conservativeness=st.sampled_from([0.01, 1.0]),
        use_cache=st.booleans(),
        tokens_per_row=st.sampled_from([1, 3]),
        window=st.sampled_from([None, None, 1, 7, 20]),
    )
    def start(
        self,
        page_size: int,
        chunk_size: int,
        step_tokens: int,
        num_slots: int,
        mixed: bool,
        policy: str,
        priorities: bool,
        conservativeness: float,
        use_cache: bool,
        tokens_per_row: int,
        window: int | None,
    ) -> None:
        config = WorkerConfig(
            chunked_prefill_size=chunk_size,
            max_prefill_tokens=step_tokens,
            disable_mixed_chunk=not mixed,
            schedule_policy=policy,
            enable_priority_scheduling=priorities,
            schedule_conservativeness=conservativeness,
            disable_radix_cache=not use_cache,
        )
        # 80 tokens in total, of which one request may need 64; with window pages 65 if all have one
        tokens = 80 if window is None else 130
        self.capacity = Capacity(
            tokens // page_size, page_size, num_slots, 64, tokens_per_row, window=window
        )
        self.engines = [FaultyEngine(self.capacity) for _ in range(2)]
        self.both = [
            SteppedScheduler(engine, config, overlap=overlap)
            for engine, overlap in zip(self.engines, (True, False), strict=True)
        ]
        self.asked: dict[str, Generate] = {}
        self.expected: dict[str, list[int]] = {}
        self.aborted: set[str] = set()

    def turn(self, *messages: ToScheduler) -> None:
        for scheduler in self.both:
            scheduler.turn(*messages)

    @rule(
        which=st.integers(0, len(PREFIXES) - 1),
        share=st.integers(0, 30),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 30),
        begun=st.integers(0, 5),
        stops=st.sampled_from([(), (3, 7), (11, 12, 13, 14, 15)]),
        seed=st.integers(0, 2),
        salt=st.sampled_from(["", "", "x"]),
        priority=st.integers(-1, 1),
        scored_from=st.none() | st.integers(0, 40),
        forced=st.booleans(),
    )
    def arrive(
        self,
        which: int,
        share: int,
        tail: list[int],
        max_tokens: int,
        begun: int,
        stops: tuple[int, ...],
        seed: int,
        salt: str,
        priority: int,
        scored_from: int | None,
        forced: bool,
    ) -> None:
        prompt = [*PREFIXES[which][:share], *tail]
        follow = forced_continuation if forced else continuation
        before = follow(prompt, min(begun, max_tokens - 1), seed)
        message = generate(
            f"r{len(self.asked)}",
            prompt,
            max_tokens,
            output=before if set(stops).isdisjoint(before) else [],
            stop_token_ids=frozenset(stops),
            seed=seed,
            cache_salt=salt,
            priority=priority,
            prompt_logprobs_from=scored_from,
            grammar=FORCING if forced else None,
        )
        self.asked[message.rid] = message
        left = max_tokens - len(message.output)
        self.expected[message.rid] = follow(prompt, left, seed, stops, message.output)
        self.turn(message)

    @rule(count=st.integers(1, 6))
    def time_passes(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.asked)))
        self.aborted.add(rid)
        self.turn(Abort(rid))

    @rule()
    def flush(self) -> None:
        self.turn(FlushCache(1))

    @precondition(
        lambda self: all(len(e.plans) >= e.last_fault + FAILURES_APART for e in self.engines)
    )
    @rule(phase=st.sampled_from(["fail_forward", "fail_sample", "fail_wait"]))
    def a_step_fails(self, phase: str) -> None:
        for engine in self.engines:
            getattr(engine, phase).add(len(engine.plans))
        self.turn()

    @rule(row=st.integers(0, 3))
    def a_row_has_no_token(self, row: int) -> None:
        for engine in self.engines:
            engine.no_token.add((len(engine.plans), row))
        self.turn()

    @rule()
    def grammars_are_lost(self) -> None:
        for scheduler in self.both:
            scheduler.grammars.is_lost = True
        self.turn()

    @invariant()
    def books_are_exact(self) -> None:
        for scheduler in getattr(self, "both", ()):
            inner = scheduler.scheduler
            inner.memory.check(list(inner.requests.values()))
            assert set(inner.planner.running) <= set(inner.requests)
            waiting = {request.rid for request in inner.planner.waiting}
            assert waiting == set(inner.requests) - set(inner.planner.running)

    @invariant()
    def nothing_wrong_was_said(self) -> None:
        for scheduler in getattr(self, "both", ()):
            for rid, expected in self.expected.items():
                got = scheduler.tokens(rid)
                assert got == expected[: len(got)]

    def check_end(self, scheduler: SteppedScheduler, asked: Generate) -> None:
        rid, sampling, expected = asked.rid, asked.sampling, self.expected[asked.rid]
        got, reason = scheduler.tokens(rid), scheduler.reason(rid)
        if reason in ("stop", "length"):
            assert got == expected
            assert (reason == "stop") == (expected[-1] in sampling.stop_token_ids)
        elif reason == "lost":
            assert asked.grammar is not None
        else:
            assert reason == "error" or (reason == "abort" and rid in self.aborted)
        if got and (first := sampling.prompt_logprobs_from) is not None:
            logprobs = scheduler.deltas[rid][0].prompt_logprobs
            wanted = range(max(1, first), len(asked.prompt))
            assert logprobs is not None
            assert logprobs.logprobs == [logprob(asked.prompt[:i], asked.prompt[i]) for i in wanted]

    def teardown(self) -> None:
        if not hasattr(self, "both"):
            return
        # A single request takes at most one turn for each token of its prompt and of its answer,
        # and the strongest request that waits for memory always advances.
        enough = 2 * (64 + 4) * (len(self.asked) + 1)
        for _ in range(enough):
            if not any(scheduler.scheduler.requests for scheduler in self.both):
                break
            self.turn()
        self.turn()  # sends the messages of the last turn
        for scheduler in self.both:
            assert not scheduler.scheduler.requests
            stats = scheduler.scheduler.stats()
            assert stats.free_slots == stats.total_slots
            assert stats.free_pages + stats.cached_pages == stats.total_pages
            for asked in self.asked.values():
                self.check_end(scheduler, asked)
        for rid in self.asked:
            reasons = [scheduler.reason(rid) for scheduler in self.both]
            if {"error", "abort", "lost"}.isdisjoint(reasons):
                assert reasons[0] == reasons[1]
                assert self.both[0].tokens(rid) == self.both[1].tokens(rid)
        for scheduler in self.both:
            scheduler.stop()


SchedulerMachine.TestCase.settings = examples(40, stateful_step_count=50, deadline=None)
TestScheduler = SchedulerMachine.TestCase
