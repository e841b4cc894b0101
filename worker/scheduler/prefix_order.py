"""The order of a step's decode rows for shared-prefix batching: attention reads a common prefix of adjacent rows once
(`kernels/attention/shared_prefixes.py`)."""

from __future__ import annotations

from mla_router.worker.scheduler.request import Request


def order_by_prefix(requests: list[Request]) -> list[Request]:
    """Returns decoding requests with common first pages side by side; the more common pages, the closer. Groups keep the
    order of their first requests."""
    if len({request.place.pages[0] for request in requests}) == len(requests):
        return requests
    groups: dict[int, int] = {}
    for request in requests:
        groups.setdefault(request.place.pages[0], len(groups))
    return sorted(requests, key=lambda r: (groups[r.place.pages[0]], r.place.prefix_key()))
