"""Selects the request to retract when memory runs out, or to preempt for a higher priority.

When memory runs out, the request with the strongest claim (highest priority, then oldest) stays. It fits into memory
alone, because a larger request is refused on arrival. So it advances in every step and ends after finitely many steps.
Then another request has the strongest claim. So every request ends.
"""

from __future__ import annotations

from collections.abc import Collection

from mla_router.worker.scheduler.request import Request, State


def all_but_strongest(running: Collection[Request]) -> list[Request]:
    strongest = min(running, key=lambda request: request.seniority)
    return [request for request in running if request is not strongest]


def cheapest(candidates: Collection[Request]) -> Request:
    """Returns the request of the lowest priority, then with the fewest tokens to compute again, then the youngest. A
    request that only waits for its last token has no tokens to compute again."""

    def cost(request: Request) -> tuple[int, int, int]:
        wants_more = request.state is State.PREFILL or request.wants_decode
        return request.priority, request.computed_length if wants_more else 0, -request.arrival

    return min(candidates, key=cost)
