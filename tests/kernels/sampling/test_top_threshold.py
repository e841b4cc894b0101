"""top_threshold against a sorted list in float64: the kernel and the torch function."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.sampling.top_threshold import (
    SHORTLIST,
    top_threshold_torch,
    top_threshold_triton,
)
from support.examples import examples
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

OPS = pytest.mark.parametrize(
    "op",
    # With room for few likely tokens, the kernel reads the whole row if there are more.
    [top_threshold_torch, top_threshold_triton, partial(top_threshold_triton, room=8)],
    ids=["torch", "triton", "triton_little_room"],
)


def expected(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """Returns the threshold by a walk down the sorted row."""
    if temperature == 0:
        return float("-inf")
    ordered = row.double().sort(descending=True).values
    weights = ((ordered - ordered[0]) / temperature).exp()
    kept = ordered[: top_k or len(ordered)]
    goal = top_p * weights[: len(kept)].sum()
    mass, last = 0.0, 0
    for place, weight in enumerate(weights[: len(kept)].tolist()):
        if top_p < 1 and mass >= goal:
            break
        mass, last = mass + weight, place
    least = kept[last].item() if top_k or top_p < 1 else float("-inf")
    if min_p > 0:
        least = max(least, ordered[weights >= min_p][-1].item())
    return least


def kept(logits: Tensor, threshold: Tensor) -> Tensor:
    return logits.float() >= threshold[:, None]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, list[tuple[float, int, float, float]]]:
    rows, vocab_size = draw(st.integers(1, 3)), draw(st.sampled_from([1, 20, 1500]))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = 4 * torch.randn(rows, vocab_size, generator=noise)
    match draw(st.sampled_from(["any", "ties", "masked", "positive", "extreme", "peaked"])):
        case "ties":
            logits = logits.round()
        case "masked":
            logits[torch.rand(logits.shape, generator=noise) < 0.5] = float("-inf")
            logits[:, 0] = 0.0
        case "positive":
            logits = logits.abs()
        case "extreme":
            logits = logits * 1e30
        case "peaked":
            logits[:, :9] += 20.0
    settings = [
        (
            draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
            draw(st.sampled_from([0, 1, 2, 7, SHORTLIST, SHORTLIST + 1, 5000])),
            # Not a share that a few equal tokens have exactly
            draw(st.sampled_from([1e-9, 0.123, 0.51234, 0.95123, 1.0])),
            draw(st.sampled_from([0.0, 0.0, 0.0512])),
        )
        for _ in range(rows)
    ]
    return logits, settings


@OPS
@examples(10)
@given(batch=batches())
def test_the_same_tokens_stay_as_in_a_sorted_list(
    op: object, batch: tuple[Tensor, list[tuple[float, int, float, float]]]
) -> None:
    assert callable(op)
    logits, rows = batch
    temperature, top_p, min_p = (torch.tensor([row[i] for row in rows]) for i in (0, 2, 3))
    top_k = torch.tensor([row[1] for row in rows], dtype=torch.int64)
    threshold = op(*(x.to(DEVICE) for x in (logits, temperature, top_k, top_p, min_p))).cpu()
    want = torch.tensor([expected(x, *row) for x, row in zip(logits, rows, strict=True)])
    differ = kept(logits, threshold) != kept(logits, want)
    # Sums in float32 may end one of many small tokens sooner or later than in float64.
    assert (differ.sum(dim=-1) <= (0 if logits.shape[1] <= 20 else 2)).all(), (threshold, want)


@OPS
def test_equal_tokens_share_the_places_that_are_left(op: object) -> None:
    """top_k counts two of five equal tokens: the share of top_p is over three tokens, not six."""
    assert callable(op)
    logits = torch.tensor([[2.0, 1, 1, 1, 1, 1, 0]], device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    share = 2.718281828 / (2.718281828 + 2)  # of the first among the three
    for top_p, least in ((share - 0.01, 2.0), (share + 0.01, 1.0)):
        got = op(logits, one, (3 * one).long(), top_p * one, 0 * one)
        assert got.tolist() == [least]


@OPS
def test_a_broken_row_spoils_no_other(op: object) -> None:
    assert callable(op)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows = torch.ones(4, device=DEVICE)
    want = op(logits, rows, (5 * rows).long(), 0.5 * rows, 0 * rows)
    logits[0, 3], logits[1, 3], logits[2] = float("nan"), float("inf"), float("-inf")
    assert op(logits, rows, (5 * rows).long(), 0.5 * rows, 0 * rows)[3] == want[3]


def test_wrong_shapes_are_named() -> None:
    two, three = torch.zeros(2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"logits \(2, 9\).*\(3,\)"):
        top_threshold_triton(torch.zeros(2, 9), two, three, two, two)


def launches() -> None:
    with torch.device("meta"):
        rows, top_k = torch.empty(32), torch.empty(32, dtype=torch.int64)
        for dtype in (torch.float32, torch.bfloat16):
            top_threshold_triton(torch.empty(32, 102_400, dtype=dtype), rows, top_k, rows, rows)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
