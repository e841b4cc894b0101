"""The work of one launch of ragged prefill attention: the lengths of the chunks, and the queries of each program.

Everything is computed from host integers. The tables are made once a step, are copied to the device with
the other inputs of the step, and serve all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Query rows of a program. Tall blocks read keys fewer times. Short chunks leave most of a tall block empty, and few tall
# blocks leave most of a GPU idle while the block with the most keys runs.
TALL_BLOCK = 128
SHORT_BLOCK = 64
# Programs from which tall blocks are faster on an H200: 768 queries with 16 heads have this many.
FEW_PROGRAMS = 96


@dataclass(frozen=True, slots=True)
class PrefillTables:
    """`PrefillWork` on the host. C chunks, B query blocks; all arrays are int32."""

    extents: tuple[tuple[int, int], ...]
    causal: bool
    block_queries: int
    key_starts: NDArray[np.int32]  # [C + 1]
    query_blocks: NDArray[np.int32]  # [B, 5]
    window: int | None = None
    gaps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """C chunks. Their query rows follow one another, and so do their key rows."""

    extents: tuple[tuple[int, int], ...]  # of each chunk: query rows n, key rows s
    causal: bool  # a chunk's queries are its last positions, and each attends to the positions up to its own
    block_queries: int  # query rows of a program
    key_starts: Tensor  # [C + 1] int32: first key row of each chunk, and their number
    # [B, 5] int32, for each program: its first query row, the query rows of its chunk from there on, the chunk's first
    # key row, the number of keys up to the program's first query, and the number of the chunk's keys. Each query of a
    # causal chunk has one key more than the query before. A program without query rows does nothing, so a table may be
    # longer than its work
    query_blocks: Tensor
    window: int | None = None  # of an `AttentionSpec`
    # With a window, for each chunk of a pass that is not causal: positions between its last key and its first query
    gaps: tuple[int, ...] = ()

    @classmethod
    def on(
        cls,
        device: torch.device | str,
        extents: Sequence[tuple[int, int]],
        *,
        heads: int,
        causal: bool = True,
        block_queries: int = 0,
        window: int | None = None,
        gaps: Sequence[int] = (),
    ) -> PrefillWork:
        """Returns the work with its tables copied to `device`, for a single call."""
        tables = prefill_tables(
            extents,
            heads=heads,
            causal=causal,
            block_queries=block_queries,
            window=window,
            gaps=gaps,
        )
        key_starts = torch.from_numpy(tables.key_starts).to(device)
        return cls.of(tables, key_starts, torch.from_numpy(tables.query_blocks).to(device))

    @classmethod
    def of(cls, tables: PrefillTables, key_starts: Tensor, query_blocks: Tensor) -> PrefillWork:
        """Returns the work of `tables`, whose arrays were copied to these tensors."""
        return cls(
            tables.extents,
            tables.causal,
            tables.block_queries,
            key_starts,
            query_blocks,
            tables.window,
            tables.gaps,
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
    window: int | None = None,
    gaps: Sequence[int] = (),
) -> PrefillTables:
    """Returns the tables for chunks of (query rows n, key rows s) with this many query heads.

    If `causal`, n <= s and a chunk's queries are the last n of its s positions; otherwise each query attends to all s
    keys. Of these a query attends to the keys at its last `window` positions; then a pass that is not causal needs the
    `gaps` of its chunks. Programs with the most keys come first, so that the last ones to end are short. `block_queries`
    are the query rows of a program; 0: chosen by the chunks.
    """
    assert extents and all(
        queries > 0 and keys >= (queries if causal else 0) for queries, keys in extents
    ), f"extents (queries, keys) {extents}, {causal=}"
    assert len(gaps) == (len(extents) if window and not causal else 0), (
        f"{window=} {causal=} {gaps=} of extents {extents}"
    )
    rows = block_queries or _block_queries([queries for queries, _ in extents], heads)
    blocks, query_row, key_starts = [], 0, [0]
    for chunk, (queries, keys) in enumerate(extents):
        for first in range(0, queries, rows):
            seen = keys - queries + first + 1 if causal else keys
            if gaps:
                seen = keys + gaps[chunk] + first + 1
            longest = min(seen + rows - 1, keys) - max(seen - (window or seen), 0)
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
        window,
        tuple(gaps),
    )


def _block_queries(lengths: Sequence[int], heads: int) -> int:
    tall = heads * sum(-(-length // TALL_BLOCK) for length in lengths)
    return TALL_BLOCK if max(lengths) > SHORT_BLOCK and tall > FEW_PROGRAMS else SHORT_BLOCK
