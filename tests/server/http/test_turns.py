"""A burst of requests is spread over iterations of the event loop, in order."""

from __future__ import annotations

import asyncio
from collections import Counter

from mla_router.worker.server.http.turns import PER_ITERATION, Turns

REQUESTS = 10 * PER_ITERATION + 1


class Iterations:
    """Counts the iterations of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._tick()

    def _tick(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._tick)


def test_a_burst_is_spread_in_order() -> None:
    async def burst() -> list[tuple[int, int]]:
        turns, iterations = Turns(), Iterations()
        taken: list[tuple[int, int]] = []

        async def request(number: int) -> None:
            await turns.take()
            taken.append((number, iterations.number))

        await asyncio.gather(*map(request, range(REQUESTS)))
        return taken

    taken = asyncio.run(burst())
    assert [number for number, _ in taken] == list(range(REQUESTS))
    assert max(Counter(iteration for _, iteration in taken).values()) == PER_ITERATION


def test_a_request_alone_does_not_wait() -> None:
    async def alone() -> None:
        turns = Turns()
        for _ in range(3 * PER_ITERATION):
            request = turns.take()
            try:
                request.send(None)
            except StopIteration:
                await asyncio.sleep(0)  # the next one comes in another iteration
                continue
            raise AssertionError("it waited")

    asyncio.run(alone())


def test_turns_of_clients_that_left_go_to_the_next() -> None:
    async def leave() -> None:
        turns, iterations = Turns(), Iterations()
        requests = [asyncio.ensure_future(turns.take()) for _ in range(REQUESTS)]
        await asyncio.sleep(0)
        for request in requests[PER_ITERATION : 5 * PER_ITERATION]:
            request.cancel()
        before = iterations.number
        await asyncio.wait(requests[-1:])
        # Half of the turns, and the steps from a turn to the end of its task
        assert iterations.number - before < REQUESTS / PER_ITERATION
        assert all(request.done() for request in requests)

    asyncio.run(leave())
