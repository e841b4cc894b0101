"""Prefill attention over more keys than may exist at once: in passes, whose results are merged.

Keys and values of all heads are several times what the cache keeps of a token. A step's chunks may follow
prefixes of any length, so that it is their number of keys, not of new tokens, that has to be bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mla_router.worker.engine.attention.layout import ChunkExtent
from mla_router.worker.engine.upload import Upload
from mla_router.worker.kernels.attention.prefill_work import PrefillWork, prefill_tables


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Attention of all queries of the step over some keys of each chunk's request."""

    work: PrefillWork
    slots: Tensor  # [C] int32
    first_rows: Tensor  # [C] int32, first of the keys in its request


def plan_passes(
    chunks: Sequence[ChunkExtent], heads: int, max_keys: int, upload: Upload
) -> list[Pass]:
    """Of so many query heads: one causal pass over everything if that is at most `max_keys` keys; otherwise
    one over the new tokens themselves, and others over so many keys of the prefixes each."""
    extents = [(chunk.length, chunk.end) for chunk in chunks]
    firsts = [[0] * len(chunks)]
    if sum(keys for _, keys in extents) <= max_keys:
        spans = [extents]
    else:
        spans = [[(chunk.length, chunk.length) for chunk in chunks]]
        firsts = [[chunk.start for chunk in chunks]]
        for first, keys in _pieces([chunk.start for chunk in chunks], max_keys):
            spans.append([(chunk.length, n) for chunk, n in zip(chunks, keys, strict=True)])
            firsts.append(first)
    tables = [prefill_tables(span, heads=heads, causal=i == 0) for i, span in enumerate(spans)]
    arrays = [np.array([chunk.slot for chunk in chunks], dtype=np.int32)]
    for table, first in zip(tables, firsts, strict=True):
        arrays += [table.key_starts, table.query_blocks, np.array(first, dtype=np.int32)]
    slots, *rest = upload(arrays)
    return [
        Pass(
            PrefillWork(table.extents, table.causal, table.block_queries, *rest[3 * i : 3 * i + 2]),
            slots,
            rest[3 * i + 2],
        )
        for i, table in enumerate(tables)
    ]


def _pieces(lengths: Sequence[int], most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cuts runs of `lengths` into pieces of `most` in all: where each run is taken up in a piece, and
    how much of it is taken."""
    first = [0] * len(lengths)
    while any(at < length for at, length in zip(first, lengths, strict=True)):
        room, taken = most, []
        for at, length in zip(first, lengths, strict=True):
            taken.append(min(room, length - at))
            room -= taken[-1]
        yield list(first), taken
        first = [at + n for at, n in zip(first, taken, strict=True)]
