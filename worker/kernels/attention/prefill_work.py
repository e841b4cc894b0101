"""What ragged prefill attention has to do in one launch: how long each chunk is, and which program takes
which of its queries.

Everything is computed from host integers. The tables are made once a step, travel to the device with
the step's other inputs, and serve all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Query rows of a program: the taller, the fewer times keys are read; short chunks would leave most
# of a tall one idle, and few tall ones most of a GPU, as all wait for the one with the most keys.
TALL_BLOCK = 128
SHORT_BLOCK = 64
# With tall blocks. On an H200, of 16 heads: 768 queries alone, which have as many, take 16.2 us with short blocks and 16.5
# with tall ones, 640 take 13.5 and 14.7, 896 take 19.7 and 18.0.
FEW_PROGRAMS = 96


@dataclass(frozen=True, slots=True)
class PrefillTables:
    """`PrefillWork` before it is on a device. C chunks, B query blocks, all arrays int32."""

    extents: tuple[tuple[int, int], ...]
    causal: bool
    block_queries: int
    key_starts: NDArray[np.int32]  # [C + 1]
    query_blocks: NDArray[np.int32]  # [B, 5]


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """C chunks, whose query rows and key rows follow one another."""

    extents: tuple[tuple[int, int], ...]  # of each chunk: query rows n, key rows s
    causal: bool  # a chunk's queries are the last of its positions, each of which sees those up to itself
    block_queries: int  # query rows of a program
    key_starts: Tensor  # [C + 1] int32: first key row of each chunk, and their number
    # [B, 5] int32, of each program: its first query row, how many query rows its chunk has from there on, the chunk's first
    # key row, how many keys the first query sees, and how many the last one of the chunk does. Each query of a causal
    # chunk sees one key more than the one before it. A program without query rows does nothing, so that a table may be
    # longer than its work
    query_blocks: Tensor

    @classmethod
    def on(
        cls,
        device: torch.device | str,
        extents: Sequence[tuple[int, int]],
        *,
        heads: int,
        causal: bool = True,
    ) -> PrefillWork:
        """With tables of its own, copied to `device` now: for a single call."""
        tables = prefill_tables(extents, heads=heads, causal=causal)
        return cls(
            tables.extents,
            tables.causal,
            tables.block_queries,
            torch.from_numpy(tables.key_starts).to(device),
            torch.from_numpy(tables.query_blocks).to(device),
        )

    @property
    def num_queries(self) -> int:
        return sum(queries for queries, _ in self.extents)

    @property
    def num_keys(self) -> int:
        return sum(keys for _, keys in self.extents)


def prefill_tables(
    extents: Sequence[tuple[int, int]],
    *,
    heads: int,
    causal: bool = True,
    block_queries: int = 0,
) -> PrefillTables:
    """Tables for chunks of (query rows n, key rows s), each with so many query heads.

    If `causal`, n <= s and a chunk's queries are the last n of its s positions; otherwise each query
    sees all s keys. Programs that see the most keys come first: the last ones to end are then short.
    `block_queries`: query rows of a program; 0: what suits the chunks.
    """
    assert extents and all(
        queries > 0 and keys >= (queries if causal else 0) for queries, keys in extents
    ), f"extents (queries, keys) {extents}, {causal=}"
    rows = block_queries or _block_queries([queries for queries, _ in extents], heads)
    blocks, query_row, key_starts = [], 0, [0]
    for queries, keys in extents:
        for first in range(0, queries, rows):
            seen = keys - queries + first + 1 if causal else keys
            longest = min(seen + rows - 1, keys)
            blocks.append(
                (-longest, query_row + first, queries - first, key_starts[-1], seen, keys)
            )
        query_row += queries
        key_starts.append(key_starts[-1] + keys)
    blocks.sort()
    return PrefillTables(
        tuple(extents),
        causal,
        rows,
        np.asarray(key_starts, dtype=np.int32),
        np.asarray([block[1:] for block in blocks], dtype=np.int32),
    )


def _block_queries(lengths: Sequence[int], heads: int) -> int:
    tall = heads * sum(-(-length // TALL_BLOCK) for length in lengths)
    return TALL_BLOCK if max(lengths) > SHORT_BLOCK and tall > FEW_PROGRAMS else SHORT_BLOCK
