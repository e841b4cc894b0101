"""The waiting queue: its order, and that no request starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.messages import ToScheduler
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.scheduler.waiting import MAX_OVERTAKEN, WINDOW, WaitingQueue
from support.examples import examples
from support.scripted_scheduler import generate, run


def request(arrival: int, priority: int = 0, cached: int = 0) -> Request:
    made = Request(generate(f"r{arrival}", [1]), arrival=arrival, priority=priority)
    made.cached_tokens = cached
    return made


def retracted(arrival: int) -> Request:
    made = request(arrival)
    made.move_to(State.PREFILL)
    made.retract()
    return made


def order(queue: WaitingQueue) -> list[int]:
    return [r.arrival for r in queue.candidates(lambda r: r.cached_tokens)]


def test_the_longest_cached_prefix_comes_first_within_a_priority() -> None:
    queue = WaitingQueue(least_work_first=True)
    for made in (request(0), request(1, cached=9), request(2, 1), request(3, 1, 5), request(4)):
        queue.add(made)
    assert order(queue) == [3, 2, 1, 0, 4]


def test_first_come_first_served_if_so_configured() -> None:
    queue = WaitingQueue(least_work_first=False)
    for made in (request(0), request(1, cached=9), request(2, 1)):
        queue.add(made)
    assert order(queue) == [2, 0, 1]


def test_retracted_requests_are_admitted_first_in_order_of_arrival() -> None:
    queue = WaitingQueue(least_work_first=True)
    queue.add(request(1, cached=9))
    for arrival in (7, 3, 5):
        queue.add(retracted(arrival))
    queue.add(request(8, 1))
    assert order(queue) == [8, 3, 5, 7, 1]


def test_streams_of_another_worker_go_before_new_requests() -> None:
    """The client of a broken stream waits in the middle of an answer."""
    for least_work_first in (True, False):
        queue = WaitingQueue(least_work_first=least_work_first)
        queue.add(request(1, cached=9))
        queue.add(retracted(2))
        continued = Request(generate("c", [1], output=[5]), arrival=6)
        queue.add(continued)
        queue.add(request(3))
        assert order(queue) == [2, 6, 1, 3]
        queue.remove(continued)
        assert order(queue) == [2, 1, 3]
        assert len(queue) == 3


def test_lookups_do_not_grow_with_the_queue() -> None:
    queue, looked = WaitingQueue(least_work_first=True), []
    for i in range(4096):
        queue.add(request(i))

    def cached_tokens(request: Request) -> int:
        looked.append(request)
        return 0

    assert len(queue.candidates(cached_tokens)) == len(looked) == WINDOW


@examples(30, deadline=None)
@given(
    ahead=st.integers(0, 40),
    steps=st.lists(st.integers(0, 8), min_size=100, max_size=300),
)
def test_overtaking_has_a_bound(ahead: int, steps: list[int]) -> None:
    """Requests with a longer prefix keep arriving, as many as are admitted in each step."""
    queue = WaitingQueue(least_work_first=True)
    for i in range(ahead):
        queue.add(request(i))
    patient = request(ahead)
    queue.add(patient)
    arrival, overtaken = ahead + 1, 0
    for count in steps:
        for _ in range(count + 1):
            queue.add(request(arrival, cached=arrival))
            arrival += 1
        admitted = queue.candidates(lambda r: r.cached_tokens)[:count]
        queue.take(admitted)
        if patient in admitted:
            break
        overtaken += sum(r.arrival > patient.arrival for r in admitted)
    assert overtaken == patient.overtaken
    assert overtaken < MAX_OVERTAKEN + WINDOW
    assert patient in admitted or sum(steps) <= ahead + MAX_OVERTAKEN + WINDOW


def test_in_a_scheduler_a_warm_prefix_overtakes_and_is_overtaken_in_the_end() -> None:
    warm, cold = [i % 50 for i in range(20)], [49 - i % 50 for i in range(20)]
    script: dict[int, list[ToScheduler]] = {
        0: [generate("first", warm)],
        20: [generate("cold", cold), *(generate(f"w{i:03}", [*warm, i % 50]) for i in range(200))],
    }
    outcome = run(script)
    started = list(outcome.channel.deltas())
    place = started.index("cold")
    assert 1 + MAX_OVERTAKEN <= place < 1 + MAX_OVERTAKEN + WINDOW
