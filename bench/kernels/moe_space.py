"""The tilings that `tune_moe.py` tries, without those that can be excluded without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

from mla_router.worker.kernels.moe.tiling import MoeShape, Tile

Stage = Literal["gate_up", "down"]

SHARED_BYTES = 227 << 10
# Outputs of one weight, inputs, warps, stages. One of gate_up reads as many columns of two weights.
GEMM = {
    16: ((16, 32, 64, 128), (64, 128, 256), (4,), (3, 4, 5)),
    32: ((32, 64, 128), (64, 128), (4,), (3, 4, 5)),
    64: ((32, 64, 128, 256), (64, 128), (4, 8), (3, 4)),
    128: ((64, 128, 256), (64, 128), (4, 8), (3, 4)),
}


def rows_for(tokens: int, top_k: int, experts: int) -> tuple[int, ...]:
    """Returns the candidate numbers of rows in a block. 1: pairs are not sorted."""
    each = tokens * top_k / experts
    if tokens == 1:
        return (1,)  # shared experts go along only so
    if tokens <= 4:
        return (1, 16)
    if each <= 2:
        return (16,)
    if each <= 16:
        return (16, 32, 64)
    return (32, 64, 128) if each <= 64 else (64, 128)


def candidates(stage: Stage, rows: int, shape: MoeShape) -> Iterator[Tile]:
    weights = 2 if stage == "gate_up" else 1
    depth = shape.hidden if stage == "gate_up" else shape.width
    if rows == 1:
        most_steps = 8 if stage == "gate_up" else 4  # of one expert: all are unrolled
        for block_n, block_k, warps in product((2, 4, 8, 16), (256, 512, 1024, 2048), (4, 8)):
            lanes = weights * block_n * block_k / (32 * warps)  # numbers that a thread holds
            steps = -(-depth // block_k)
            if 16 <= lanes <= 128 and steps <= most_steps and block_k < 2 * depth:
                yield Tile(block_n, block_k, num_warps=warps)
        return
    outputs, depths, warps_, stages_ = GEMM[rows]
    for output, block_k, warps, stages in product(outputs, depths, warps_, stages_):
        sums = rows * output / (32 * warps)  # registers of a thread for them
        stage_bytes = (rows + output) * block_k * 2
        if 4 <= sums <= 128 and 16 << 10 <= stages * stage_bytes <= SHARED_BYTES:
            yield Tile(output // weights, block_k, 8, warps, stages)
