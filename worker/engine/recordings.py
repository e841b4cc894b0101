"""What all recordings of steps as CUDA graphs have in common: there is one for each of some sizes."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)


class Sized(Protocol):
    @property
    def size(self) -> int:
        """Rows."""
        ...


R = TypeVar("R", bound=Sized)


class Recordings(Generic[R]):
    """A step takes the smallest that has as many rows; the rows too many are padding."""

    def __init__(self, recordings: Iterable[R] = ()) -> None:
        self._recordings = sorted(recordings, key=lambda recording: recording.size)
        self._sizes = [recording.size for recording in self._recordings]

    def fitting(self, rows: int) -> R | None:
        at = bisect_left(self._sizes, rows)
        return self._recordings[at] if at < len(self._sizes) else None


def record_sizes(
    what: str, record: Callable[[int, Any], R], sizes: Sequence[int], device: torch.device
) -> list[R]:
    """`record` of each of `sizes` and of the memory pool that all of them share: only one of them runs at
    a time. Says how long it took and how much memory."""
    begin, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
    pool = torch.cuda.graph_pool_handle()
    # The largest first: the others fit into the memory that it has asked for.
    progress = tqdm(sorted(sizes, reverse=True), desc=f"Recording {what}", disable=None)
    recordings = [record(size, pool) for size in progress]
    logger.info(
        "Recorded %s of %d sizes up to %d rows: %.1f s, %.0f MB",
        what,
        len(sizes),
        max(sizes),
        time.perf_counter() - begin,
        (free - torch.cuda.mem_get_info(device)[0]) / 1e6,
    )
    return recordings
