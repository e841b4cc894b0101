"""Prefill attention in passes over a limited number of keys. The results of the passes are merged.

Keys and values of all heads are several times as large as the latents in the cache, and chunks may follow prefixes of any
length. So the number of keys that exist at a time must be limited, not only the number of new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from mla_router.worker.engine.attention.layout import ChunkExtent
from mla_router.worker.engine.upload import Upload
from mla_router.worker.kernels.attention.prefill_work import PrefillWork, prefill_tables


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Attention of all queries of the step over some keys of each chunk's request. C chunks."""

    work: PrefillWork
    slots: Tensor  # [C] int32
    first_rows: Tensor  # [C] int32, index of the first key in its request
    has_own_keys: bool  # the keys are those of the queries' tokens, and no others


def plan_passes(
    chunks: Sequence[ChunkExtent],
    heads: int,
    max_keys: int,
    upload: Upload,
    window: int | None = None,
    block_queries: int = 0,
) -> list[Pass]:
    """Returns one causal pass over all keys if they are at most `max_keys`. Otherwise returns a causal pass over the new
    tokens, then passes over up to `max_keys` keys of the prefixes each. Keys before the `window` of a chunk's first query
    are in no pass. `heads`: query heads; `block_queries`: see `prefill_tables`."""
    tabled = partial(prefill_tables, heads=heads, window=window, block_queries=block_queries)
    starts = [chunk.start for chunk in chunks]
    begins = [chunk.first_key(window) for chunk in chunks]
    extents = [(chunk.length, chunk.end - at) for chunk, at in zip(chunks, begins, strict=True)]
    if sum(keys for _, keys in extents) <= max_keys:
        tables, firsts = [tabled(extents)], [begins]
    else:
        own = [(chunk.length, chunk.length) for chunk in chunks]
        tables = [tabled(own)]
        firsts = [starts]
        prefixes = [start - at for start, at in zip(starts, begins, strict=True)]
        for first, keys in _split(prefixes, max_keys):
            span = [(chunk.length, n) for chunk, n in zip(chunks, keys, strict=True)]
            after = [size - i - n for size, i, n in zip(prefixes, first, keys, strict=True)]
            tables.append(tabled(span, causal=False, gaps=after if window else ()))
            firsts.append([at + i for at, i in zip(begins, first, strict=True)])
    arrays = [np.array([chunk.slot for chunk in chunks], dtype=np.int32)]
    for table, first in zip(tables, firsts, strict=True):
        arrays += [table.key_starts, table.query_blocks, np.array(first, dtype=np.int32)]
    slots, *rest = upload(arrays)
    return [
        Pass(
            PrefillWork.of(table, *rest[3 * i : 3 * i + 2]),
            slots,
            rest[3 * i + 2],
            has_own_keys=i == 0 and firsts[0] == starts,
        )
        for i, table in enumerate(tables)
    ]


def _split(lengths: Sequence[int], most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Splits runs of `lengths` elements into parts of `most` elements in total. Yields for each part the first element
    and the number of elements of each run."""
    first = [0] * len(lengths)
    while any(at < length for at, length in zip(first, lengths, strict=True)):
        room, taken = most, []
        for at, length in zip(first, lengths, strict=True):
            taken.append(min(room, length - at))
            room -= taken[-1]
        yield list(first), taken
        first = [at + n for at, n in zip(first, taken, strict=True)]
