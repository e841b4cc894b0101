"""Samples one token for each row of logits: the likeliest, or one drawn from softmax(logits / temperature).

A draw is the Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014, arXiv:1411.0030): the argmax of
logits / T + g, where the noise g = -log(-log u) of `noise.py` depends on (seed, position, token) alone.
It needs no sum over the row, so the kernel reads the logits once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.sampling.noise import GOLDEN, MIX_1, MIX_2, gumbel
from mla_router.worker.step.result import NO_TOKEN

# Rows are cut into slices: this many programs occupy a GPU, and this many results of one row are compared at once.
_PROGRAMS = 1024
_MAX_SLICES = 128
_BLOCK = 1024


def sample(
    logits: Tensor,
    slots: Tensor,
    lengths: Tensor,
    temperature: Tensor,
    seed: Tensor,
    threshold: Tensor | None,
    last_token: Tensor,
    out: Tensor,
) -> None:
    """Writes the token with the largest score of each row of `logits` [R, V] float32 or bfloat16, the first of equal
    ones; NO_TOKEN if the score is not finite, or if the row has a NaN. Writes to `out` [R] int32, which may be pinned
    memory of the host, and to `last_token` [S] int64 at the rows' `slots` [R] int64, which are distinct; there 0 stands
    for NO_TOKEN, since the next step may read it. Adds 1 to `lengths` [S] int32 at the same slots: their tokens before
    the new ones, so the positions of these.

    `temperature` [S] float32 is 0 for slots whose scores are the logits. The noise of the other slots follows from
    `seed` [S] int64 and the position. `threshold` [R] float32, if given, excludes smaller logits from a draw. The
    arithmetic is float32.
    """
    op = sample_triton if logits.is_cuda else sample_torch
    op(logits, slots, lengths, temperature, seed, threshold, last_token, out)


def sample_torch(
    logits: Tensor,
    slots: Tensor,
    lengths: Tensor,
    temperature: Tensor,
    seed: Tensor,
    threshold: Tensor | None,
    last_token: Tensor,
    out: Tensor,
) -> None:
    temperature, seed, positions = temperature[slots], seed[slots], lengths[slots].long()
    best, token = logits.float().max(dim=-1)
    rows = (temperature > 0).nonzero()[:, 0]
    if len(rows):
        scores = logits[rows].float()
        if threshold is not None:
            scores.masked_fill_(scores < threshold[rows, None], float("-inf"))
        scores /= temperature[rows, None]
        scores += gumbel(seed[rows], positions[rows], logits.shape[1])
        best[rows], token[rows] = scores.max(dim=-1)
    token = torch.where(best.isfinite(), token, NO_TOKEN)
    last_token[slots] = token.clamp_min(0)
    lengths[slots] += 1
    out.copy_(token)


def sample_triton(
    logits: Tensor,
    slots: Tensor,
    lengths: Tensor,
    temperature: Tensor,
    seed: Tensor,
    threshold: Tensor | None,
    last_token: Tensor,
    out: Tensor,
    *,
    num_warps: int = 4,
) -> None:
    """Finds the best token of each slice of a row, then the best of these."""
    rows, vocab_size = logits.shape
    per_row = (slots, slots if threshold is None else threshold, out)
    per_slot = (lengths, temperature, seed, last_token)
    assert logits.stride(1) == 1 and all(
        x.shape == (rows,) and x.stride() == (1,) for x in per_row
    ), (
        f"logits {tuple(logits.shape)} {logits.stride()}, slots, threshold, out "
        f"{[(tuple(x.shape), x.stride()) for x in per_row]}"
    )
    assert all(x.stride() == (1,) for x in per_slot), f"{[x.stride() for x in per_slot]}"
    slices, width = tiling(rows, vocab_size)
    best = torch.empty(rows, slices, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, slices, dtype=torch.int32, device=logits.device)
    _best_of_slice_kernel[(rows, slices)](
        logits,
        slots,
        lengths,
        temperature,
        seed,
        temperature if threshold is None else threshold,
        best,
        token,
        logits.stride(0),
        vocab_size,
        width,
        BLOCK=_BLOCK,
        FILTERED=threshold is not None,
        num_warps=num_warps,
        **launch_options(),
    )
    _best_of_row_kernel[(rows,)](
        best,
        token,
        slots,
        lengths,
        last_token,
        out,
        slices,
        MAX_SLICES=_MAX_SLICES,
        NONE=NO_TOKEN,
        num_warps=1,
        **launch_options(),
    )


def tiling(rows: int, vocab_size: int) -> tuple[int, int]:
    """Returns the number of slices of a row and their size, a multiple of the block."""
    blocks = triton.cdiv(vocab_size, _BLOCK)
    wanted = min(blocks, _MAX_SLICES, triton.cdiv(_PROGRAMS, max(rows, 1)))
    width = triton.cdiv(blocks, wanted) * _BLOCK
    return triton.cdiv(vocab_size, width), width


# The alignment of a batch's numbers varies: specialized on it, a kernel would be compiled under load.
@triton.jit(
    do_not_specialize_on_alignment=["slots", "lengths", "temperatures", "seeds", "thresholds"],
)
def _best_of_slice_kernel(
    logits,
    slots,
    lengths,
    temperatures,
    seeds,
    thresholds,
    best,
    token,
    stride,
    vocab_size,
    width,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
):
    wait_for_previous()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    noise = noise_row(tl.load(seeds + slot), tl.load(lengths + slot))
    best_score = tl.full((), float("-inf"), tl.float32)
    best_token = part * width  # if all logits of the slice are -inf
    for start in range(part * width, min((part + 1) * width, vocab_size), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab_size
        score = tl.load(logits + row * stride + column, inside, other=float("-inf"))
        score = score.to(tl.float32)
        if temperature > 0:
            if FILTERED:
                score = tl.where(score < tl.load(thresholds + row), float("-inf"), score)
            score = tl.div_rn(score, tl.zeros((BLOCK,), tl.float32) + temperature)
            score += gumbel_noise(noise, column)
        # A maximum ignores NaN: infinity stands for it, and gives NO_TOKEN as well
        score = tl.where(score < float("inf"), score, float("inf"))
        block_score, place = tl.max(
            score, 0, return_indices=True, return_indices_tie_break_left=True
        )
        if block_score > best_score:
            best_score = block_score
            best_token = start + place
    at = row * tl.num_programs(1) + part
    tl.store(best + at, best_score)
    tl.store(token + at, best_token)


@triton.jit(
    do_not_specialize=["slices"],
    do_not_specialize_on_alignment=["slots", "lengths", "last_token", "out"],
)
def _best_of_row_kernel(
    best,
    token,
    slots,
    lengths,
    last_token,
    out,
    slices,
    MAX_SLICES: tl.constexpr,
    NONE: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, MAX_SLICES)
    score = tl.load(best + row * slices + part, part < slices, other=float("-inf"))
    best_score, place = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    found = tl.load(token + row * slices + place)
    finite = (best_score > float("-inf")) & (best_score < float("inf"))
    tl.store(out + row, tl.where(finite, found, NONE))
    slot = tl.load(slots + row)
    tl.store(last_token + slot, tl.where(finite, found, 0).to(tl.int64))
    tl.store(lengths + slot, tl.load(lengths + slot) + 1)


# `noise.py` with unsigned numbers, whose right shifts are logical.
_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(constant) for constant in (GOLDEN, MIX_1, MIX_2))


@triton.jit
def noise_row(seed, position):
    """Returns the state of the noise of a seed and a position, for `gumbel_noise`."""
    golden = tl.full((), _GOLDEN, tl.uint64)
    return _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64) * golden)


@triton.jit
def gumbel_noise(state, token):
    """Returns the noise of tokens, as `noise.gumbel`."""
    bits = _mix(state + token.to(tl.uint64) * tl.full((), _GOLDEN, tl.uint64))
    uniform = ((bits >> 41).to(tl.uint32).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
    return -tl.log(-tl.log(uniform))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * tl.full((), _MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _MIX_2, tl.uint64)
    return x ^ (x >> 31)
