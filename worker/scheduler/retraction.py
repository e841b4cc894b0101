"""Who has to go when memory runs out, or when a higher priority wants it.

When it runs out, the request with the strongest claim (highest priority, then longest here) stays. As no request
is accepted that the whole memory could not hold, that one is in every step in which its turn comes,
and ends after finitely many; then another one is the strongest. So everybody's turn comes.
"""

from __future__ import annotations

from collections.abc import Collection

from mla_router.worker.scheduler.request import Request, State


def all_but_strongest(running: Collection[Request]) -> list[Request]:
    strongest = min(running, key=lambda request: request.seniority)
    return [request for request in running if request is not strongest]


def cheapest(candidates: Collection[Request]) -> Request:
    """The one whose going costs least: of the lowest priority, and with the fewest tokens to compute
    again, the youngest. One that only waits for its last token has none."""

    def cost(request: Request) -> tuple[int, int, int]:
        wants_more = request.state is State.PREFILL or request.wants_decode
        return request.priority, request.settled_length if wants_more else 0, -request.arrival

    return min(candidates, key=cost)
