"""Hopper's products of few rows and large weights, compiled for sm_90. Gluon has no interpreter: results are tested on a GPU
(`tests/gpu/test_linear_cuda.py`)."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.hopper_ring import full_waves
from mla_router.worker.kernels.linear_hopper import SPLITS, linear_hopper
from support.sm90 import REGISTERS, compile_sm90

ROWS = (2, 12, 32, 64)


def launches() -> None:
    """Launches Llama 3 8B's output, with inputs whole and in two parts, and its head."""
    x, weight, head = (
        torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (64, 4096, 128256)
    )
    for rows in ROWS:
        for split in (1, 2):
            linear_hopper(x[:rows], weight, out_dtype=x.dtype, constant=True, split=split)
    linear_hopper(x, head, out_dtype=torch.float32, constant=True, split=2)
    linear_hopper(x, weight, out_dtype=x.dtype, constant=False, split=1)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
        report.check_resident(1)
        half_of_registers = 2 * report.registers * 32 * report.num_warps <= REGISTERS
        assert half_of_registers, f"no room for a norm beside it: {report}"
        assert report.has_wgmma, report
        assert report.reads_ahead == report.constants["AHEAD"], report


@pytest.mark.parametrize(
    ("outputs", "split"),
    [(4096, 2), (6144, 1), (8448, 1), (8449, 2), (28672, 2)],
)
def test_the_last_wave_is_full(outputs: int, split: int) -> None:
    assert full_waves(outputs, SPLITS, 132) == split
