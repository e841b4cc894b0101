"""The tilings that `tune.py` tries, without those that can be excluded by arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Literal

from mla_router.worker.kernels.moe import quantized_gemm_hopper as hopper
from mla_router.worker.kernels.tuned import TunedTile

Stage = Literal["dense", "few rows", "gate_up", "down"]

SHARED_BYTES = 227 << 10
GROUP = 8  # of the candidates; `GROUPS` are tried with the best ones
GROUPS = (1, 2, 16, 32)
MIN_GROUP = 64  # outputs of gate_up that leave it with one scale: a step of down lies within one
FP8, BF16 = 1, 2  # bytes of a number
Choices = tuple[int, ...]
# Rows of a block: outputs of one weight, inputs, warps, stages. One of gate_up reads as many columns of two weights.
# Steps of FP8 lie within a scale of 128 inputs.
SPACES: Mapping[int, Mapping[int, tuple[Choices, Choices, Choices, Choices]]] = {
    FP8: {
        16: ((32, 64, 128), (64, 128), (4,), (3, 4)),
        32: ((32, 64, 128), (64, 128), (4,), (3, 4)),
        64: ((32, 64, 128), (64, 128), (4, 8), (3, 4)),
        128: ((64, 128), (64, 128), (4, 8), (3, 4)),
    },
    BF16: {
        16: ((16, 32, 64, 128), (64, 128, 256), (4,), (3, 4, 5)),
        32: ((32, 64, 128), (64, 128), (4,), (3, 4, 5)),
        64: ((32, 64, 128, 256), (64, 128), (4, 8), (3, 4)),
        128: ((64, 128, 256), (64, 128), (4, 8), (3, 4)),
    },
}
MAX_INPUTS_AT_ONCE = 4096
BLOCKS = (16, 32, 64, 128)


def rows_of_dense(rows: int) -> tuple[int, ...]:
    """Returns the candidate numbers of rows in a block of a dense product: the smallest for all rows, and its neighbours."""
    smallest = min(bisect_left(BLOCKS, rows), len(BLOCKS) - 1)
    return BLOCKS[max(smallest - 1, 0) : smallest + 2]


def rows_of_experts(tokens: int, top_k: int, experts: int, number_bytes: int) -> tuple[int, ...]:
    """Returns the candidate numbers of rows in a block. 1: pairs are not sorted."""
    each = tokens * top_k / experts
    if number_bytes == BF16 and tokens <= 4:
        return (1,) if tokens == 1 else (1, 16)  # shared experts of one token need unsorted pairs
    if each <= 2:
        return (16,)
    if each <= 16:
        return (16, 32, 64)
    return (32, 64, 128) if each <= 64 else (64, 128)


def candidates(stage: Stage, rows: int, inputs: int, number_bytes: int) -> Iterator[TunedTile]:
    """Yields tilings with blocks of `rows` rows for a product with so many inputs."""
    if rows == 1:
        yield from _unsorted(stage, inputs)
        return
    if number_bytes == FP8 and rows == hopper.ROWS and stage != "dense":
        # Triton's tiles of so many rows are slower than those of 64
        columns = hopper.OUTPUTS * (1 if stage == "gate_up" else 2)
        for group, stages in product((GROUP, 2 * GROUP), (3, 4)):
            yield TunedTile(rows, columns, 128, group, hopper.NUM_WARPS, stages)
        return
    if number_bytes == FP8 and rows <= 32 and stage in ("gate_up", "down"):
        columns = hopper.OUTPUTS if stage == "gate_up" else hopper.OUTPUTS // 2
        yield TunedTile(rows, columns, 128, 1, hopper.NUM_WARPS, 3)
    outputs, depths, all_warps, all_stages = SPACES[number_bytes][rows]
    for columns, depth, warps, stages in product(outputs, depths, all_warps, all_stages):
        if stage == "gate_up" and number_bytes == BF16:
            columns //= 2
        total = columns * (2 if stage == "gate_up" else 1)
        sums = rows * total / (32 * warps)  # registers of a thread for them
        stage_bytes = (rows + total) * depth * number_bytes
        if number_bytes == FP8 and stage != "down" and depth < 128:
            continue  # twice the steps for nothing: a scale has 128 inputs
        if number_bytes == FP8 and stage == "gate_up" and columns < MIN_GROUP:
            continue
        if warps == 8 and rows * total < 64 * 128:
            continue
        if depth <= inputs and 4 <= sums <= 128 and 8 << 10 <= stages * stage_bytes <= SHARED_BYTES:
            yield TunedTile(rows, columns, depth, GROUP, warps, stages)


def candidates_of_few_rows(rows: int, inputs: int) -> Iterator[TunedTile]:
    """Yields tilings of the kernel that streams weights for up to 16 rows. Few inputs fit into registers at once."""
    all_stages = (0, 3) if inputs <= MAX_INPUTS_AT_ONCE else (2, 3, 4)
    for columns, warps, stages in product((16, 32), (4, 8), all_stages):
        yield TunedTile(8 if rows <= 8 else 16, columns, 128, 1, warps, stages)


def _unsorted(stage: Stage, inputs: int) -> Iterator[TunedTile]:
    """Yields tilings in which each pair of token and expert streams its weights."""
    weights, most_steps = (2, 8) if stage == "gate_up" else (1, 4)  # steps are unrolled
    for columns, depth, warps in product((2, 4, 8, 16), (256, 512, 1024, 2048), (4, 8)):
        numbers = weights * columns * depth / (32 * warps)  # that a thread holds
        if 16 <= numbers <= 128 and -(-inputs // depth) <= most_steps and depth < 2 * inputs:
            yield TunedTile(1, columns, depth, 1, warps, 3)
