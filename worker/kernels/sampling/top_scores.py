"""The tokens with the largest scores of each row of logits: the candidates of a tree of drafts.

A score is logits / temperature plus the noise of `sample.py`, without noise if the temperature is 0. So the first token
is the one that `sample` draws, and all are a draw without replacement (Gumbel-top-k; Kool et al., 2019,
arXiv:1903.06059).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, wait_for_previous
from mla_router.worker.kernels.sampling.noise import gumbel
from mla_router.worker.kernels.sampling.sample import gumbel_noise, noise_row

# Columns of a program, which finds the best of them
_BLOCK = 4096


def top_scores(
    logits: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Returns the `count` best tokens of each row of `logits` [R, V], best first, [R, count] int64, and the logarithms
    of their shares in softmax(scores), float32. `positions` [R] int32: of these tokens. `temperature` [R] float32,
    `seed` [R] int64. The arithmetic is float32."""
    op = top_scores_triton if logits.is_cuda else top_scores_torch
    return op(logits, positions, temperature, seed, count)


def top_scores_torch(
    logits: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    draws = (temperature > 0)[:, None]
    scores = logits.float() / torch.where(draws, temperature[:, None], 1.0)
    noise = gumbel(seed, positions.long(), logits.shape[1])
    scores = torch.where(draws, scores + noise, scores)
    best, tokens = scores.topk(count)
    return tokens, best - scores.logsumexp(dim=1, keepdim=True)


def top_scores_triton(
    logits: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Finds the best tokens of each block of a row, then the best of these. A score that is not finite counts as -inf."""
    rows, vocab_size = logits.shape
    per_row = positions, temperature, seed
    assert logits.stride(1) == 1 and all(
        x.shape == (rows,) and x.stride() == (1,) for x in per_row
    ), f"logits {tuple(logits.shape)} {logits.stride()}, {[x.stride() for x in per_row]}"
    blocks = triton.cdiv(vocab_size, _BLOCK)
    assert count <= _BLOCK, f"{count} of {_BLOCK}"
    best = torch.empty(rows, blocks * count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, blocks * count, dtype=torch.int64, device=logits.device)
    totals = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    _top_of_block_kernel[(rows, blocks)](
        logits,
        positions,
        temperature,
        seed,
        best,
        tokens,
        totals,
        logits.stride(0),
        vocab_size,
        BLOCK=_BLOCK,
        COUNT=count,
        num_warps=8,
        **launch_options(),
    )
    found = tokens.new_empty(rows, count)
    shares = best.new_empty(rows, count)
    _top_of_row_kernel[(rows,)](
        best,
        tokens,
        totals,
        found,
        shares,
        BLOCKS=blocks,
        WIDTH=triton.next_power_of_2(blocks),
        COUNT=count,
        FOUND=triton.next_power_of_2(blocks * count),
        num_warps=1 if blocks * count <= 256 else 4,
        **launch_options(),
    )
    return found, shares


@triton.jit(do_not_specialize_on_alignment=["positions", "temperatures", "seeds"])
def _top_of_block_kernel(
    logits,
    positions,
    temperatures,
    seeds,
    best,
    tokens,
    totals,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    wait_for_previous()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    score = tl.load(logits + row * stride + column, inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        score = tl.div_rn(score, tl.zeros((BLOCK,), tl.float32) + temperature)
        noise = noise_row(tl.load(seeds + row), tl.load(positions + row))
        score += gumbel_noise(noise, column)
    score = tl.where(score < float("inf"), score, float("-inf"))
    at = row * tl.num_programs(1) + block
    largest = tl.maximum(tl.max(score, 0), -1e30)
    tl.store(totals + at, largest + tl.log(tl.sum(tl.exp(score - largest), 0)))
    for rank in tl.static_range(COUNT):
        found, place = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best + at * COUNT + rank, found)
        token = tl.minimum(block * BLOCK + place, vocab_size - 1)
        tl.store(tokens + at * COUNT + rank, token.to(tl.int64))
        score = tl.where(column == block * BLOCK + place, float("-inf"), score)


@triton.jit
def _top_of_row_kernel(
    best,
    tokens,
    totals,
    out,
    shares,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    FOUND: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    block, place = tl.arange(0, WIDTH), tl.arange(0, FOUND)
    total = tl.load(totals + row * BLOCKS + block, block < BLOCKS, other=float("-inf"))
    largest = tl.max(total, 0)
    total = largest + tl.log(tl.sum(tl.exp(total - largest), 0))
    own = row * (BLOCKS * COUNT)
    score = tl.load(best + own + place, place < BLOCKS * COUNT, other=float("-inf"))
    left = place < BLOCKS * COUNT
    for rank in range(COUNT):
        largest = tl.max(tl.where(left, score, float("-inf")), 0)
        first = tl.min(tl.where(left & (score == largest), place, FOUND), 0)
        left = left & (place != first)
        tl.store(out + row * COUNT + rank, tl.load(tokens + own + first))
        tl.store(shares + row * COUNT + rank, largest - total)
