"""Few rows to the ranks of their experts over shared memory: processes that interpret the kernels, against loops."""

from __future__ import annotations

import random

import pytest
import torch

from mla_router.worker.kernels.comm import one_shot_all_to_all
from mla_router.worker.kernels.comm.all_to_all import Choice, ExpertTables
from mla_router.worker.kernels.comm.one_shot_all_to_all import RowBoxes
from mla_router.worker.kernels.weight import Activations, Quantized
from support import all_to_all
from support.all_to_all import Rows, expected
from support.ranks import ranks
from support.sm90 import compile_sm90


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_calls_of_changing_shapes(size: int) -> None:
    """Not every call has all rows. Ranks come late by turns. Afterwards no slot holds anything, so no row went where it
    has no expert."""
    draw = random.Random(size)
    cases = [
        Rows(
            (draw.randint(1, 4),) * size,
            draw.choice((4, 136, 256)),
            draw.choice((None, torch.float8_e4m3fn, torch.int8)),
            seed,
        )
        for seed in range(12)
    ]
    processes = ranks(size)
    results = processes.call(all_to_all.in_files, processes.folder, cases, 0.004)
    for rank, (outcomes, is_empty) in enumerate(results):
        assert is_empty, f"rank {rank}"
        for rows, outcome in zip(cases, outcomes, strict=True):
            for got, wanted in zip(outcome, expected(rows, rank, torch.float16), strict=True):
                assert torch.equal(got, wanted), rows


def boxes(size: int) -> RowBoxes:
    words = one_shot_all_to_all.words(128, size, 8192)
    memory = torch.empty(words, dtype=torch.int32, device="meta")
    addresses = torch.empty(size, dtype=torch.int64, device="meta")
    turns = torch.empty(128, dtype=torch.int32, device="meta")
    return RowBoxes(1, size, 8192, memory, addresses, turns)


def test_shape_and_dtype_decide() -> None:
    def serves(rows: int, width: int, dtype: torch.dtype = torch.bfloat16, top_k: int = 8) -> bool:
        return boxes(8).serve(width, dtype, top_k, rows)

    assert serves(128, 7168) and not serves(129, 64) and not serves(0, 64)
    assert serves(1, 8192) and not serves(1, 8196) and not serves(1, 62)
    assert serves(1, 64, torch.float16) and not serves(1, 64, torch.float32)
    assert not serves(1, 64, top_k=33)


def launches() -> None:
    """Launches V3's rows, plain and quantized, with and without counts of the pairs."""

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for size in (2, 8):
        table, reaches = (
            meta(256, 4, dtype=torch.int32),
            meta(256, 4, size, dtype=torch.bool),
        )
        choice = Choice(meta(16, 8), meta(16, 8, dtype=torch.int32))
        plain = meta(16, 7168, dtype=torch.bfloat16)
        values, scales = meta(16, 7168, dtype=torch.float8_e4m3fn), meta(56, 16).t()
        for rows, counts in (
            (plain, None),
            (Quantized(values, scales, 128, plain.dtype), meta(256, dtype=torch.int64)),
        ):
            sent_rows: Activations = rows
            sent = one_shot_all_to_all.dispatch(
                boxes(size), sent_rows, choice, ExpertTables(table, reaches, counts)
            )
        one_shot_all_to_all.combine(boxes(size), meta(16 * size, 7168, dtype=plain.dtype), sent)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
