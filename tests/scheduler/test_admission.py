"""Whom a scheduler admits at once, and whom it lets wait for another request's prefix or for memory."""

from __future__ import annotations

import pytest

from mla_router.worker.config import WorkerConfig
from mla_router.worker.messages import Abort, ToScheduler
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.scheduler.waiting import MAX_OVERTAKEN
from mla_router.worker.step.engine import Capacity
from support.fake_engine import FakeEngine
from support.scripted_scheduler import generate, run
from support.stepped_scheduler import SteppedScheduler

PROMPT = [i % 50 for i in range(40)]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_small_request_of_higher_priority_starts_beside_a_large_one_that_waits_for_memory(
    overlap: bool,
) -> None:
    """A request that arrives after the large one did not fit is considered, although nothing else has changed."""
    script: dict[int, list[ToScheduler]] = {
        0: [generate("running", PROMPT, 80)],
        5: [generate("large", [49 - token for token in PROMPT] * 2, 40)],
        15: [generate("small", [7, 8, 9], 4, priority=5)],
    }
    outcome = run(
        script,
        overlap=overlap,
        capacity=Capacity(num_pages=40, page_size=4, num_slots=6, context_length=160),
        chunk_size=128,
        enable_priority_scheduling=True,
        schedule_conservativeness=1.5,
    )
    assert outcome.channel.turns("small")[0] < 20
    assert outcome.channel.turns("large")[0] > outcome.channel.turns("running")[-1] - 1
    assert outcome.scheduler.stats().retracted == 0


@pytest.mark.parametrize("salts", [("x", "y"), ("x", "x")])
def test_requests_of_two_cache_salts_do_not_wait_for_each_others_prefix(
    salts: tuple[str, str],
) -> None:
    """With one salt the second request finds the prefix that the first has computed."""
    first, second = (generate(f"r{i}", PROMPT, cache_salt=salt) for i, salt in enumerate(salts))
    outcome = run({0: [first, second]}, chunk_size=128)
    begun = [outcome.channel.turns(f"r{i}")[0] for i in range(2)]
    assert (begun[0] == begun[1]) == (salts[0] != salts[1])


@pytest.mark.parametrize(("length", "waits"), [(33, True), (32, False)])
def test_a_prefix_of_32_tokens_is_waited_for(length: int, waits: bool) -> None:
    """The last token of a prompt is computed in any case."""
    outcome = run({0: [generate(rid, PROMPT[:length]) for rid in "ab"]}, chunk_size=128)
    begun = [outcome.channel.turns(rid)[0] for rid in "ab"]
    assert (begun[0] < begun[1]) == waits


@pytest.mark.parametrize("priority", [0, 1])
def test_a_request_that_was_overtaken_too_often_waits_for_a_prefix_of_its_priority(
    priority: int,
) -> None:
    """The first request advances at each step, so the second starts sooner than by its own computation. Requests of
    higher priority may delay a first request of lower priority for ever."""
    capacity = Capacity(num_pages=64, page_size=4, num_slots=8, context_length=128)
    config = WorkerConfig(
        chunked_prefill_size=4, max_prefill_tokens=4, enable_priority_scheduling=True
    )
    stepped = SteppedScheduler(FakeEngine(capacity), config, overlap=False)
    stepped.turn(generate("first", PROMPT * 2))
    stepped.turn(generate("second", PROMPT * 2, priority=priority))
    admission = stepped.scheduler.planner.admission
    assert [request.rid for request in admission.prefilling] == ["first"]
    assert admission.next_candidate() is None
    stepped.scheduler.requests["second"].overtaken = MAX_OVERTAKEN
    assert (admission.next_candidate() is None) == (priority == 0)
    stepped.stop()


def test_a_request_that_was_overtaken_too_often_does_not_wait_behind_one_without_memory() -> None:
    """The first of two requests with the same prefix waits for memory. The second needs less."""
    capacity = Capacity(num_pages=24, page_size=4, num_slots=8, context_length=96)
    stepped = SteppedScheduler(FakeEngine(capacity), WorkerConfig(), overlap=False)
    stepped.turn(generate("running", [49 - token for token in PROMPT[:8]], 40))
    stepped.turn(generate("large", PROMPT * 2, 2), generate("small", PROMPT, 2))
    waiting = [stepped.scheduler.requests[rid] for rid in ("large", "small")]
    assert [request.state for request in waiting] == [State.WAITING] * 2
    for request in waiting:
        request.overtaken = MAX_OVERTAKEN
    admission = stepped.scheduler.planner.admission
    assert [candidate.request.rid for candidate in admission._candidates()] == ["large", "small"]
    stepped.stop()


def test_two_requests_of_one_step_that_were_overtaken_share_their_prefix() -> None:
    stepped = SteppedScheduler(
        FakeEngine(Capacity(num_pages=64, page_size=4, num_slots=8, context_length=128)),
        WorkerConfig(),
        overlap=False,
    )
    admission = stepped.scheduler.planner.admission
    add = admission.waiting.add

    def add_overtaken(request: Request) -> None:
        request.overtaken = MAX_OVERTAKEN
        add(request)

    admission.waiting.add = add_overtaken  # type: ignore[method-assign]
    stepped.turn(generate("first", PROMPT, 4), generate("second", PROMPT, 4))
    stepped.turn()
    assert stepped.scheduler.requests["second"].num_cached == 36
    stepped.stop()


def test_a_request_that_waits_for_all_pages_starts_when_exactly_they_are_free() -> None:
    capacity = Capacity(num_pages=10, page_size=4, num_slots=4, context_length=41)
    stepped = SteppedScheduler(FakeEngine(capacity), WorkerConfig(), overlap=False)
    stepped.turn(generate("holds", [1] * 6, 3))
    stepped.turn(generate("large", PROMPT[:39], 2))  # the last token is not written: 40 of 40
    for _ in range(20):
        stepped.turn()
    assert stepped.reason("holds") == "length"
    assert stepped.reason("large") == "length"
    stepped.stop()


def test_requests_pass_one_that_waits_for_memory_as_soon_as_their_part_of_it_is_free() -> None:
    """`large` is tried first, because its prompt is short. Beside it an eighth of all pages may be taken: by `first`, and
    by `second` after the end of `first`."""
    capacity = Capacity(num_pages=64, page_size=4, num_slots=4, context_length=256)
    stepped = SteppedScheduler(FakeEngine(capacity), WorkerConfig(), overlap=False)
    stepped.turn(generate("holds", [1] * 50, 200))
    stepped.turn(generate("large", [2] * 4, 200))
    stepped.turn(generate("first", [3] * 28, 5))
    stepped.turn(generate("second", [4] * 28, 5))
    assert [len(stepped.tokens(rid)) for rid in ("large", "second")] == [0, 0]
    for _ in range(20):
        stepped.turn()
    assert [stepped.reason(rid) for rid in ("first", "second", "large")] == ["length", "length", ""]
    stepped.turn(generate("nine pages", [5] * 32, 5))
    for _ in range(20):
        stepped.turn()
    assert stepped.tokens("nine pages") == []
    stepped.stop()


def with_a_small_request_after_a_large_one() -> SteppedScheduler:
    """Both wait in order of arrival: `large` for memory, and `small`, which fits, for `large`."""
    capacity = Capacity(num_pages=64, page_size=4, num_slots=4, context_length=256)
    config = WorkerConfig(schedule_policy="fcfs")
    stepped = SteppedScheduler(FakeEngine(capacity), config, overlap=False)
    stepped.turn(generate("holds", [1] * 50, 200))
    stepped.turn(generate("large", [2] * 4, 200))
    stepped.turn(generate("small", [3] * 28, 5))
    return stepped


def test_in_order_of_arrival_nobody_passes_one_that_waits_for_memory() -> None:
    stepped = with_a_small_request_after_a_large_one()
    for _ in range(20):
        stepped.turn()
    assert [len(stepped.tokens(rid)) for rid in ("large", "small")] == [0, 0]
    stepped.stop()


def test_an_aborted_request_that_waited_for_memory_blocks_nobody() -> None:
    stepped = with_a_small_request_after_a_large_one()
    assert stepped.scheduler.stats().waiting == 2
    stepped.turn(Abort("large"))
    for _ in range(10):
        stepped.turn()
    assert [stepped.reason(rid) for rid in ("holds", "large", "small")] == ["", "abort", "length"]
    assert stepped.scheduler.stats().waiting == 0
    stepped.stop()
