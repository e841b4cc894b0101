"""Hopper's products of few rows and large weights, compiled for sm_90. Gluon has no interpreter: results are tested on a GPU
(`tests/gpu/test_linear_cuda.py`)."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.linear_hopper import (
    HALF_RING_BYTES,
    RING_BYTES,
    Tiling,
    linear_hopper,
    tiling,
)
from support.sm90 import REGISTERS, compile_sm90

ROWS = (1, 12, 32, 64)


def launches() -> None:
    """Launches Llama 3 8B's output, with inputs whole and in two parts, and its head."""
    x, weight, head = (
        torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (64, 4096, 128256)
    )
    for rows in ROWS:
        for split in (1, 2):
            tiles = Tiling(split, RING_BYTES)
            linear_hopper(x[:rows], weight, out_dtype=x.dtype, constant=True, tiles=tiles)
    linear_hopper(x, head, out_dtype=torch.float32, constant=True)
    linear_hopper(x, weight, out_dtype=x.dtype, constant=False)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
        report.check_resident(1)
        half_of_registers = 2 * report.registers * 32 * report.num_warps <= REGISTERS
        assert half_of_registers, f"no room for a norm beside it: {report}"
        assert report.has_wgmma, report
        assert report.reads_ahead == report.constants["AHEAD"], report


def half_launches() -> None:
    """Launches Llama 3 8B's gate and up, whose programs have half a multiprocessor each."""
    x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (64, 28672))
    for rows in ROWS:
        linear_hopper(x[:rows], weight, out_dtype=x.dtype, constant=True)


def test_two_programs_fit_a_multiprocessor() -> None:
    for report in compile_sm90(half_launches):
        report.check()
        report.check_resident(2)


@pytest.mark.parametrize(
    ("rows", "outputs", "tiles"),
    [
        (1, 4096, Tiling(2, RING_BYTES)),
        (64, 4096, Tiling(2, RING_BYTES)),
        (8, 6144, Tiling(2, HALF_RING_BYTES)),
        (9, 6144, Tiling(1, RING_BYTES)),
        (8, 28672, Tiling(2, HALF_RING_BYTES)),
        (64, 28672, Tiling(1, HALF_RING_BYTES)),
    ],
)
def test_tiling_on_132_multiprocessors(rows: int, outputs: int, tiles: Tiling) -> None:
    assert tiling(rows, outputs, 132) == tiles
