"""sample against argmax over scores in float64: the kernel and the torch function."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.sampling.noise import gumbel
from mla_router.worker.kernels.sampling.sample import sample_torch, sample_triton, tiling
from mla_router.worker.step.result import NO_TOKEN
from support.drawing import draw as draw_tokens
from support.examples import examples
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

TEMPERATURES = [0.0, 0.7, 1.0, 2.0, 0.01]
OPS = pytest.mark.parametrize("op", [sample_torch, sample_triton])


def expected(
    logits: Tensor, temperature: Tensor, noise: Tensor, threshold: Tensor | None
) -> Tensor:
    wide = logits.double()
    if threshold is not None:
        outside = (temperature > 0)[:, None] & (wide < threshold[:, None])
        wide = wide.masked_fill(outside, float("-inf"))
    drawn = wide / temperature[:, None] + noise.double()
    return torch.where(temperature[:, None] > 0, drawn, wide).argmax(dim=-1)


def row_inputs(rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    temperature = torch.tensor(TEMPERATURES)[torch.randint(5, (rows,), generator=draw)]
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,), generator=draw)
    position = torch.randint(1 << 20, (rows,), generator=draw)
    return temperature.to(DEVICE), seed.to(DEVICE), position.to(DEVICE)


@OPS
@examples(15)
@given(
    rows=st.integers(0, 6),
    vocab_size=st.sampled_from([1, 31, 1024, 2500]),
    filtered=st.booleans(),
    number=st.integers(0, 1000),
)
def test_argmax_of_the_scores(
    op: object, rows: int, vocab_size: int, filtered: bool, number: int
) -> None:
    assert callable(op)
    draw = torch.Generator().manual_seed(number)
    # Rows are views of a wider tensor, whose other columns are NaN
    wide = torch.full((rows, vocab_size + 4), float("nan"))
    wide[:, :vocab_size] = 4 * torch.randn(rows, vocab_size, generator=draw)
    logits = wide.to(DEVICE)[:, :vocab_size]
    temperature, seed, position = row_inputs(rows, draw)
    threshold = logits.float().mean(dim=-1) if filtered else None
    got = draw_tokens(op, logits, temperature, seed, position, threshold)
    noise = gumbel(seed, position, vocab_size)
    assert got.tolist() == expected(logits, temperature, noise, threshold).tolist()


@OPS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token(op: object, temperature: float) -> None:
    assert callable(op)
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0))
    logits[0, 2999] = float("nan")
    logits[1] = float("nan")
    logits[2, 1500] = float("inf")
    logits[3] = float("-inf")
    logits[4] = float("-inf")
    logits[4, 2998] = -1e38
    rows = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    temperatures = torch.full_like(rows, temperature).float()
    got = draw_tokens(op, logits.to(DEVICE), temperatures, rows, rows, None)
    assert got.tolist()[:5] == [NO_TOKEN] * 4 + [2998]
    assert got[5] != NO_TOKEN


@OPS
def test_the_first_of_several_is_taken(op: object) -> None:
    """Equal logits may be in different slices."""
    assert callable(op)
    logits = torch.zeros(3, 3000)
    logits[0, [1700, 700, 2999]] = 1
    logits[1, [2998, 2999]] = 1
    rows = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    got = draw_tokens(op, logits.to(DEVICE), rows.float(), rows, rows, None)
    assert got.tolist() == [700, 2998, 0]


def test_wrong_shapes_are_named() -> None:
    two, three = torch.zeros(2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"logits \(2, 9\).*\(3,\)"):
        sample_triton(torch.zeros(2, 9), three, three.int(), two, three, None, three, three.int())


@given(rows=st.integers(0, 2000), vocab_size=st.integers(1, 300_000))
def test_slices_cover_the_row(rows: int, vocab_size: int) -> None:
    slices, width = tiling(rows, vocab_size)
    assert 1 <= slices <= 128
    assert (slices - 1) * width < vocab_size <= slices * width


def launches() -> None:
    with torch.device("meta"):
        integers = torch.empty(32, dtype=torch.int64)
        for dtype in (torch.float32, torch.bfloat16):
            for threshold in (None, torch.empty(32)):
                for vocab_size in (102_400, 129_280):
                    logits = torch.empty(32, vocab_size, dtype=dtype)
                    slots = integers.int(), torch.empty(64), integers
                    sample_triton(logits, integers, *slots, threshold, integers, integers.int())


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
