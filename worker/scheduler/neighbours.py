"""The order of a step's decode rows: attention reads once what neighbours have in common
(`kernels/attention/shared_prefixes.py`)."""

from __future__ import annotations

from mla_router.worker.scheduler.request import Request


def neighbours(requests: list[Request]) -> list[Request]:
    """Decoding requests, those with the same first page side by side, and the more so the more pages they have in
    common. Runs of them stay in the order of their first requests."""
    if len({request.pages[0] for request in requests}) == len(requests):
        return requests
    runs: dict[int, int] = {}
    for request in requests:
        runs.setdefault(request.pages[0], len(runs))
    return sorted(requests, key=lambda r: (runs[r.pages[0]], r.place_in_tree()))
