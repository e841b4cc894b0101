"""The waiting times of long and short prompts side by side."""

from __future__ import annotations

import pytest

from mla_router.worker.engine.first_steps import first_steps
from mla_router.worker.messages import ToScheduler
from mla_router.worker.scheduler.prefill_budget import PrefillBudget, size_class
from mla_router.worker.scheduler.request import Request
from mla_router.worker.scheduler.step_time import TARGET_S, StepTimeModel, TokenBudget
from mla_router.worker.step.engine import Capacity, StepSeconds
from support.fake_engine import VOCAB, continuation
from support.scripted_scheduler import generate, run
from support.timed_engine import TimedEngine

LONG, SHORT = 7384, 30
CAPACITY = Capacity(num_pages=4096, page_size=16, num_slots=64, context_length=8192)


class Served:
    """Runs a script on a timed engine, and keeps the step of each request's first token."""

    def __init__(self, script: dict[int, list[ToScheduler]], **settings: int | str) -> None:
        self.engine = TimedEngine(CAPACITY)
        measured = first_steps(self.engine, vocab_size=VOCAB, largest=8192)
        self.engine.steps.clear()
        self.arrived = {m.rid: at for at, messages in script.items() for m in messages}  # type: ignore[union-attr]
        outcome = run(
            script,
            engine=self.engine,
            capacity=CAPACITY,
            chunk_size=8192,
            measured=measured,
            use_prefix_cache=False,
            **settings,
        )
        self.first = {rid: outcome.channel.turns(rid)[0] for rid in self.arrived}
        for messages in script.values():
            for message in messages:
                expected = continuation(message.prompt, message.sampling.max_tokens)  # type: ignore[union-attr]
                assert outcome.channel.tokens(message.rid) == expected  # type: ignore[union-attr]

    def waited(self, rid: str) -> float:
        """Returns the virtual seconds from its arrival to its first token. Each receive launches a step."""
        steps = self.engine.steps[self.arrived[rid] : self.first[rid]]
        return sum(seconds for _, seconds in steps)


def flood(count: int, **fields: int) -> list[ToScheduler]:
    return [generate(f"long{i}", [i % VOCAB] * LONG, 4, **fields) for i in range(count)]


def alone(length: int) -> float:
    return Served({0: [generate("alone", [1] * length, 4)]}).waited("alone")


@pytest.mark.parametrize("count", [8, 16])
def test_a_short_prompt_beside_a_flood_of_long_ones_waits_in_proportion_to_its_size(
    count: int,
) -> None:
    """16 long prompts do not fit into memory, so most of them wait for admission."""
    script: dict[int, list[ToScheduler]] = {0: flood(count), 5: [generate("a", [3] * SHORT, 4)]}
    script[50] = [generate("b", [4] * SHORT, 4)]
    served = Served(script)
    assert served.waited("long7") > 8 * alone(LONG) / 2
    for rid in ("a", "b"):
        assert served.waited(rid) < 4 * TARGET_S, f"{rid} waited {served.waited(rid)} s"


def test_fcfs_is_in_order_of_arrival() -> None:
    script: dict[int, list[ToScheduler]] = {0: flood(3), 5: [generate("a", [3] * SHORT, 4)]}
    served = Served(script, schedule_policy="fcfs")
    assert served.first["a"] > served.first["long1"]


def test_a_long_prompt_advances_at_half_speed_beside_a_flood_of_short_ones() -> None:
    script: dict[int, list[ToScheduler]] = {0: [generate("long", [1] * LONG, 4)]}
    for turn in range(1, 200):
        script[turn] = [generate(f"{turn}-{i}", [i] * 200, 1) for i in range(3)]
    served = Served(script)
    # Twice as long, and some time for the rows of the other requests
    assert served.waited("long") < 2.5 * alone(LONG)


def test_a_long_prompt_that_waits_for_memory_is_passed_but_not_for_ever() -> None:
    """Short requests keep arriving, until the request that owns most of the memory ends, and long after."""
    capacity = Capacity(num_pages=128, page_size=4, num_slots=16, context_length=400)
    script: dict[int, list[ToScheduler]] = {
        0: [generate("holds", [1] * 120, 200)],
        2: [generate("long", [2] * 300, 4)],
    }
    for turn in range(3, 600):
        script[turn] = [generate(f"s{turn}", [turn % VOCAB] * 8, 3)]
    outcome = run(script, capacity=capacity, chunk_size=64, use_prefix_cache=False)
    end = outcome.channel.turns("holds")[-1]
    assert 200 < end < outcome.channel.turns("long")[0] < end + 30
    waited = [outcome.channel.turns(f"s{turn}")[0] - turn for turn in range(3, 600)]
    assert max(waited[: end - 10]) < 10


def test_no_step_is_longer_than_half_a_second() -> None:
    script: dict[int, list[ToScheduler]] = {0: flood(4), 3: [generate("a", [3] * SHORT, 100)]}
    served = Served(script)
    assert max(seconds for _, seconds in served.engine.steps) <= 0.5


def test_the_half_by_size_goes_to_the_shortest_first_up_to_a_size_class() -> None:
    long, short = (
        Request(generate(f"{n}", [1] * n, 1), arrival=a) for a, n in enumerate((280, 10))
    )
    tokens = TokenBudget(StepTimeModel(), 100, 1.0)
    budget = PrefillBudget([long, short], tokens, chunk_size=1000, by_size=True)
    for up_to, expected in (
        (size_class(9) - 1, {long: 50}),
        (size_class(10), {long: 50, short: 10}),
        (None, {long: 90, short: 10}),
    ):
        budget.distribute(up_to)
        assert {chunk.request: chunk.tokens for chunk in budget.chunks()} == expected
    assert budget.is_spent


def test_in_a_step_without_time_for_a_token_the_oldest_prompt_has_one() -> None:
    second_a_token = StepTimeModel()
    second_a_token.calibrate(StepSeconds(0.0, 100, 100.0, 100, 0.0, 100.0))
    old, young = (Request(generate(f"{n}", [1] * 10, 1), arrival=n) for n in range(2))
    tokens = TokenBudget(second_a_token, 100, 0.5)
    budget = PrefillBudget([young, old], tokens, chunk_size=1000, by_size=True)
    budget.distribute()
    assert {chunk.request: chunk.tokens for chunk in budget.chunks()} == {old: 1}


def test_a_size_class_is_a_power_of_four() -> None:
    assert [size_class(n) for n in (1, 2, 7, 8, 31, 32, 127, 128)] == [0, 1, 1, 2, 2, 3, 3, 4]
