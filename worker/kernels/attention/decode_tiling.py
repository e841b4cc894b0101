"""The tiles of decode attention, by the number of query rows and the GPU."""

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
    programs_per_sm: int  # programs of one multiprocessor: those that fit, unless more were measured to be faster
    pieces: int = 1  # of a latent (MLA), each with its own sum of scores
    min_blocks: int = 1  # of a part: the merge of a smaller one costs more than it saves
    hopper: bool = False  # of `mla_decode_hopper.py`, `mla_decode_fp8.py` or `mla_decode_wide.py`

    @property
    def in_turns(self) -> bool:
        """Whether this is a tiling of `mla_decode_fp8.py`."""
        return self.hopper and self.num_stages == IN_TURNS_STAGES

    @property
    def wide(self) -> bool:
        """Whether this is a tiling of `mla_decode_wide.py`."""
        return self.hopper and (self.block_rows, self.block_tokens) == (WIDE_ROWS, WIDE_TOKENS)

    def shared_bytes(self, query_width: int, row_width: int, *, fp8: bool = False) -> int:
        """Returns an upper bound of a program's shared memory, for queries and cached rows of this many numbers: blocks
        of all stages but one, queries, and weights. Triton's products of 64 rows take FP8 blocks from shared memory as
        float16."""
        block = self.block_tokens * row_width
        blocks = (self.num_stages - 1) * block * (1 if fp8 and not self.wide else 2)
        converted = 2 * block if fp8 and self.block_rows >= 64 and not self.hopper else 0
        # The wide kernel has weights in the memory of a block's rotary part, and less than this to exchange results
        weights = self.block_tokens // 2 if self.wide else self.block_tokens
        return blocks + converted + 2 * self.block_rows * (query_width + weights)


# Widths of the latent and the rotary part that Hopper's kernels are made for: DeepSeek's
HOPPER_WIDTHS = (512, 64)
# Query rows and tokens of `mla_decode_wide.py`, whose `num_warps` are those of one of its warpgroups
WIDE_ROWS, WIDE_TOKENS = 64, 128
# Requests of `mla_decode_fp8.py`, and its stages. With fewer requests it loses by a later start, with more of them parts
# have several requests, between which it pauses.
IN_TURNS, IN_TURNS_STAGES = range(25, 129), 6
# Slightly fewer than the parts of the narrow tile on an H200: with more requests each part has one.
MANY_REQUESTS = 240


def tiling(
    num_heads: int,
    requests: int,
    queries: int = 1,
    *,
    widths: tuple[int, int] = HOPPER_WIDTHS,
    fp8: bool = False,
    on: Limits,
) -> Tiling:
    """Returns the tiling of MLA decode, for `queries` new tokens of each of this many requests. `widths` are the
    numbers of the latent and the rotary part of a cached row, in FP8 or in 16 bits. Raises UnsupportedDevice.

    On an H200 with 16 query rows the wide tile is the fastest for 1 to 224 requests, by itself and in whole steps
    (docs/design/kernel_choices.md).
    """
    rows, width = num_heads * queries, sum(widths)
    candidates = _mla_candidates(rows, requests, on, fp8=fp8)
    if on.is_hopper and widths == HOPPER_WIDTHS:
        candidates = [*_hopper_candidates(rows, requests, fp8=fp8), *candidates]

    def needed(tiles: Tiling) -> int:
        return tiles.shared_bytes(width, width, fp8=fp8)

    return _legal("MLA decode attention", candidates, needed, on)


def _hopper_candidates(rows: int, requests: int, *, fp8: bool) -> list[Tiling]:
    few = Tiling(16, 64, 4, num_stages=3, programs_per_sm=1, hopper=True)
    if rows <= 16 and fp8 and requests in IN_TURNS:
        return [replace(few, num_stages=IN_TURNS_STAGES)]
    if rows <= 16 and fp8:
        # Rows take half the memory, so two programs have large blocks: one computes while the other loads
        return [replace(few, programs_per_sm=2)]
    if rows <= 16:
        return [few] if requests <= MANY_REQUESTS else []
    if rows <= 32:
        some = replace(few, block_rows=32)
        return [replace(some, block_tokens=128, num_warps=8) if fp8 else some]
    if fp8 and rows <= WIDE_ROWS:
        return [replace(few, block_rows=WIDE_ROWS, num_warps=8, num_stages=4)]
    return [replace(few, block_rows=WIDE_ROWS, block_tokens=WIDE_TOKENS, num_stages=2)]


def _mla_candidates(rows: int, requests: int, on: Limits, *, fp8: bool) -> list[Tiling]:
    if rows <= 16 and fp8:
        pair = Tiling(16, 64, 4, num_stages=3, programs_per_sm=2, pieces=4)
        return [pair, replace(pair, block_tokens=32)]
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
    if rows <= 32 or on.has_tensor_memory or fp8:  # tiles of 64 rows of FP8 spill registers
        return [low, lowest]
    return [replace(low, block_rows=64), low, lowest]


def _legal(
    name: str, candidates: Sequence[Tiling], shared_bytes: Callable[[Tiling], int], on: Limits
) -> Tiling:
    """Returns the first legal candidate, with the number of programs that fit a multiprocessor."""
    chosen = first_legal(name, candidates, shared_bytes, on)
    programs = min(chosen.programs_per_sm, on.resident(shared_bytes(chosen)))
    return replace(chosen, programs_per_sm=programs)


# KV heads from which parts have so many programs that more, smaller parts are faster. Of the four programs of a
# multiprocessor three fit, and the fourth begins when one of them ends
MANY_KV_HEADS = 8


def gqa_tiling(
    share: int,
    width: int,
    *,
    num_kv_heads: int = 1,
    head_dim: int | None = None,
    fp8: bool = False,
    on: Limits,
) -> Tiling:
    """Returns the tiling of grouped-query decode, for `share` query heads to each KV head. `width` is the size of a
    token's key and value together, in FP8 or in 16 bits, `head_dim` the size of the key, by default half of it. Raises
    UnsupportedDevice.

    Heads 128 and 256 wide in 16 bits have the tiles that are fastest in the mean over batches and lengths of
    Llama 3 8B, Qwen2 7B and Gemma 2 9B on an H200 (`bench_gqa_decode.py --sweep`). The others are not measured: they
    have as many loads under way as registers and shared memory allow.
    """
    head_dim = head_dim or -(-width // 2)
    rows = min(max(16, 1 << (share - 1).bit_length()), 64)
    tokens = 64 if width <= 256 else 32
    programs = 4 if width <= 128 else 3 if width <= 320 else 2
    if rows > 16:
        programs = 2 if rows == 32 else 1
    first = Tiling(rows, tokens, 4, 3, programs_per_sm=programs, min_blocks=2)
    if rows == 16 and not fp8:
        first = _measured_gqa_tiling(first, width, num_kv_heads)
    candidates = [first, replace(first, num_stages=2)]

    def needed(tiles: Tiling) -> int:
        return tiles.shared_bytes(head_dim, width, fp8=fp8)

    return _legal("decode attention", candidates, needed, on)


def _measured_gqa_tiling(first: Tiling, width: int, num_kv_heads: int) -> Tiling:
    if width == 256 and num_kv_heads >= MANY_KV_HEADS:
        return replace(first, num_stages=2, programs_per_sm=4, min_blocks=1)
    if width == 512:
        return replace(first, num_warps=8, min_blocks=1)
    return replace(first, min_blocks=1) if width == 256 else first


@dataclass(frozen=True, slots=True)
class MergeTiling:
    block_width: int  # columns of a row that a program merges
    block_parts: int  # parts whose results are read at once
    num_warps: int = 4
    block_rows: int = 1  # of a request, which a program merges one after the other


# Rows up to which even narrow programs are few, from which a program has few parts, from which one program a row is
# enough, from which programs run in several waves, and from which most requests have a single part, so that most programs
# have nothing to do
MERGE_FEW, MERGE_ROWS, MERGE_WAVE, MERGE_WAVES, MERGE_SINGLE = 16, 64, 512, 1024, 8192


def merge_tiling(rows: int, width: int) -> MergeTiling:
    """Returns the tiling of the merge, for this many query rows of all requests with `width` numbers each: the fastest
    on an H200 in whole steps of 1, 8, 16, 32 and 128 requests."""
    columns = 1 << (width - 1).bit_length()
    if rows < MERGE_ROWS:
        return MergeTiling(min(columns, 32 if rows <= MERGE_FEW else 64), 64)
    if rows < MERGE_WAVE:
        return MergeTiling(min(columns, 64), 8, num_warps=1)
    if rows < MERGE_WAVES:
        return MergeTiling(columns, max(4096 // columns, 1))
    parts = max(2048 // columns, 1)
    return MergeTiling(columns, parts, num_warps=2, block_rows=1 if rows < MERGE_SINGLE else 4)


def num_parts(
    tiling: Tiling, num_heads: int, queries: int, device: torch.device, *, num_kv_heads: int = 1
) -> int:
    """Returns the number of parts that occupies every multiprocessor once. A part has a program for each KV head and
    tile of query rows."""
    row_blocks = -(-num_heads // num_kv_heads * queries // tiling.block_rows)
    programs = limits(device).multiprocessors * tiling.programs_per_sm
    return max(programs // (num_kv_heads * row_blocks), 1)
