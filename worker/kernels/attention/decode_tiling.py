"""Into what tiles decode attention is cut, for how many query rows and on what GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from mla_router.worker.kernels.device import Limits, first_legal, limits


@dataclass(frozen=True, slots=True)
class Tiling:
    block_rows: int  # query rows (heads x new tokens of one request) of a program
    block_tokens: int  # cached rows that are loaded at once
    num_warps: int
    num_stages: int  # of the software pipeline: loads run at most num_stages - 1 blocks ahead
    programs_per_sm: int  # that fit one multiprocessor's registers and shared memory at a time
    pieces: int = 1  # MLA's: that a latent is cut into, each with its own sum of scores
    min_blocks: int = 1  # of a part: fewer are not worth a result of their own that is to be merged

    def shared_bytes(self, query_width: int, row_width: int) -> int:
        """Shared memory of a program, at most, for queries and cached rows of so many 16-bit numbers: the blocks of
        all stages but one, queries, weights."""
        blocks = (self.num_stages - 1) * self.block_tokens * row_width
        return 2 * (blocks + self.block_rows * (query_width + self.block_tokens))


# Nearly as many as there are parts of the narrow tile on an H200, each of which then has one.
MANY_REQUESTS = 240


def tiling(
    num_heads: int, requests: int, queries: int = 1, *, width: int = 576, on: Limits
) -> Tiling:
    """Of MLA, for `queries` new tokens at a time of each of so many requests, whose cached rows are `width` numbers.
    Raises UnsupportedDevice.

    On an H200, with 16 heads. Of 16 rows the wide tile is the fastest for 2 to 224 requests of 512 to 32,768 tokens, and
    in whole steps of 4 to 160 requests of 1,024. Of one request it is, too, by itself, but with it a whole step takes
    1.7 % longer. Of 256 requests of 1,040 tokens the narrow one takes 85 us and the wide one 92, of 512 they are alike.
    Those of 32 and 64 rows are the fastest at 64 requests of 4096, each with 2 and 4
    new tokens.
    """
    candidates = _mla_candidates(num_heads * queries, requests, on)
    return _legal("MLA decode attention", candidates, lambda t: t.shared_bytes(width, width), on)


def _mla_candidates(rows: int, requests: int, on: Limits) -> list[Tiling]:
    narrow = Tiling(16, 32, 4, num_stages=3, programs_per_sm=2, pieces=8, min_blocks=2)
    if rows <= 16 and requests == 1:
        return [replace(narrow, pieces=4, min_blocks=1)]
    if rows <= 16 and requests <= MANY_REQUESTS:
        wide = Tiling(16, 64, 4, num_stages=3, programs_per_sm=1, pieces=8)
        return [wide, replace(narrow, min_blocks=1)]
    if rows <= 16:
        return [narrow]
    low = Tiling(32, 64, 8, num_stages=2, programs_per_sm=1, pieces=2)
    lowest = replace(low, block_tokens=32)
    if rows <= 32 or on.has_tensor_memory:
        return [low, lowest]
    return [replace(low, block_rows=64), low, lowest]


def _legal(
    name: str, candidates: Sequence[Tiling], shared_bytes: Callable[[Tiling], int], on: Limits
) -> Tiling:
    """The first that is legal, with as many programs at a time as fit a multiprocessor."""
    chosen = first_legal(name, candidates, shared_bytes, on)
    programs = min(chosen.programs_per_sm, on.resident(shared_bytes(chosen)))
    return replace(chosen, programs_per_sm=programs)


def gqa_tiling(share: int, width: int, *, head_dim: int | None = None, on: Limits) -> Tiling:
    """For `share` query heads to each KV head, whose key and value of a token are `width` numbers
    together, the key `head_dim`, by default half of them. Not yet measured; as many loads under way as registers
    and shared memory allow. Raises UnsupportedDevice."""
    head_dim = head_dim or -(-width // 2)
    rows = min(max(16, 1 << (share - 1).bit_length()), 64)
    tokens = 64 if width <= 256 else 32
    programs = 4 if width <= 128 else 3
    if rows > 16:
        programs = 2 if rows == 32 else 1
    first = Tiling(rows, tokens, 4, 3, programs_per_sm=programs, min_blocks=2)
    candidates = [first, replace(first, num_stages=2)]
    return _legal("decode attention", candidates, lambda t: t.shared_bytes(head_dim, width), on)


@dataclass(frozen=True, slots=True)
class MergeTiling:
    block_width: int  # columns of a row that a program merges
    block_parts: int  # whose results are read at once
    num_warps: int = 4


# Rows up to which there are few programs however narrow, those from which a program need not see to many parts, those
# from which merging needs no more programs than one a row, and those from which it is several waves
MERGE_FEW, MERGE_ROWS, MERGE_WAVE, MERGE_WAVES = 16, 64, 512, 1024


def merge_tiling(rows: int, width: int) -> MergeTiling:
    """For the results of parts of so many query rows of all requests, each `width` wide: the best of whole steps of 1, 8,
    16, 32 and 128 requests on an H200, and between these near the best of attention with its merge."""
    columns = 1 << (width - 1).bit_length()
    if rows < MERGE_ROWS:
        return MergeTiling(min(columns, 32 if rows <= MERGE_FEW else 64), 64)
    if rows < MERGE_WAVE:
        return MergeTiling(min(columns, 64), 8, num_warps=1)
    if rows < MERGE_WAVES:
        return MergeTiling(columns, max(4096 // columns, 1))
    return MergeTiling(columns, max(2048 // columns, 1), num_warps=2)


def num_parts(
    tiling: Tiling, num_heads: int, queries: int, device: torch.device, *, num_kv_heads: int = 1
) -> int:
    """As many parts as occupy every multiprocessor once. Each part takes a program for each KV head and tile of its
    query rows."""
    row_blocks = -(-num_heads // num_kv_heads * queries // tiling.block_rows)
    programs = limits(device).multiprocessors * tiling.programs_per_sm
    return max(programs // (num_kv_heads * row_blocks), 1)
