"""Tilings of the Triton kernel of ragged attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton

from mla_router.worker.kernels.attention.prefill_work import SHORT_BLOCK, TALL_BLOCK
from mla_router.worker.kernels.device import H200, Limits, first_legal


@dataclass(frozen=True, slots=True)
class Tiling:
    block_keys: int
    num_warps: int
    num_stages: int


# Widest heads whose sums leave registers for large tiles
NARROW = 192
# Programs of short blocks up to which three stages fit an H200's multiprocessors: two waves
FEW_PROGRAMS = 264


def tiling(
    block_queries: int,
    itemsize: int,
    programs: int,
    *,
    head_dim: int = 192,
    v_head_dim: int = 128,
    on: Limits = H200,
) -> Tiling:
    """Returns the tiling of this many programs of `block_queries` rows, for keys of `head_dim` and values of
    `v_head_dim` numbers of `itemsize` bytes. Raises UnsupportedDevice."""
    if itemsize > 2:  # float32, in tests: tiles are twice as large
        return Tiling(32, 4, 1)
    return _legal(block_queries, programs <= FEW_PROGRAMS, head_dim, v_head_dim, on)


def block_queries(head_dim: int, v_head_dim: int, on: Limits) -> int:
    """Returns the query rows of a program if the widths of heads decide them, or 0. Of wide heads Hopper's own kernel
    (`hopper.py`) is faster even if half of its tall blocks is empty, and on GPUs before it sums of tall blocks spill
    registers."""
    if max(head_dim, v_head_dim) <= NARROW:
        return 0
    if on.is_hopper:
        return TALL_BLOCK
    return 0 if on.has_tensor_memory_accelerator else SHORT_BLOCK


@cache
def _legal(
    block_queries: int, few_programs: bool, head_dim: int, v_head_dim: int, on: Limits
) -> Tiling:
    def shared_bytes(tiles: Tiling) -> int:
        return shared_bytes_of(tiles, block_queries, head_dim, v_head_dim, on)

    wide = max(head_dim, v_head_dim) > NARROW
    candidates = _candidates(block_queries, few_programs, on, wide=wide)
    return first_legal("prefill attention", candidates, shared_bytes, on)


def _candidates(block_queries: int, few_programs: bool, on: Limits, *, wide: bool) -> list[Tiling]:
    if not on.has_tensor_memory_accelerator:
        return [Tiling(32, 8, stages) for stages in (3, 2)]
    if wide:
        return [Tiling(32, 8, 3)] if block_queries > 64 else [Tiling(64, 8, 2)]
    if block_queries > 64:
        return [Tiling(64, 8, stages) for stages in (3, 2)]
    return [Tiling(64, 4, 3 if few_programs else 2), Tiling(64, 4, 2)]


def shared_bytes_of(
    tiles: Tiling, block_queries: int, head_dim: int, v_head_dim: int, on: Limits
) -> int:
    """Returns an upper bound of a program's shared memory with 16-bit numbers: keys and values of each stage, queries,
    weights. Copies through registers need one stage less."""
    stages = tiles.num_stages if on.has_tensor_memory_accelerator else tiles.num_stages - 1
    keys = stages * tiles.block_keys * (head_dim + padded(v_head_dim))
    return 2 * (keys + block_queries * (head_dim + tiles.block_keys))


def padded(width: int) -> int:
    """Returns the next size that Triton can multiply: a power of two, at least 16."""
    power: int = triton.next_power_of_2(width)
    return max(16, power)
