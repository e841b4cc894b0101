"""The unlikely tokens that top_k, top_p and min_p take out of a draw, told by one threshold for each row.

Tokens that are equally likely stay or go together, so ties (frequent in bfloat16) cannot make a draw
depend on a sort's whims. Nucleus sampling: Holtzman et al., 2019, arXiv:1904.09751; min_p: Nguyen et
al., 2024, arXiv:2407.01082.

The kernel sorts nothing. How many tokens, or how much probability, lies above a value falls as the
value rises, so that the smallest value with less than a goal above it is found digit by digit of its
binary number, two bits by one reading of the row: a radix select. Where the likely tokens are few, which
is the rule with a trained model, they are copied out first, and nothing else is read again.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows whose top_k is at most this are not sorted whole by the torch function: their largest logits
# are looked for. One width for all of them, since sums over rows of another width round differently,
# and a batch would show.
SHORTLIST = 1024


def top_threshold(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """[R] float32: for each row of `logits` [R, V] float32 or bfloat16 the smallest that stays.

    What stays are the `top_k` [R] int64 largest (0: all), of those the smallest set whose share of
    softmax(logits / temperature) over them reaches `top_p` [R] (1: all), and of those the ones at least
    `min_p` [R] times as likely as the likeliest, which always stays. `temperature`, `top_p` and `min_p`
    are float32. -inf for rows of temperature 0, and for those that ask for nothing; anything for
    rows with a NaN or without a finite logit. The arithmetic is float32.
    """
    op = top_threshold_triton if logits.is_cuda else top_threshold_torch
    return op(logits, temperature, top_k, top_p, min_p)


def top_threshold_torch(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    drawn = temperature > 0
    threshold = logits.float().amax(dim=-1) + temperature * min_p.log()
    threshold.masked_fill_(~drawn | (min_p == 0), float("-inf"))
    top = drawn & ((top_k > 0) | (top_p < 1))
    short = top & (top_k > 0) & (top_k <= SHORTLIST)
    for group, width in ((short, SHORTLIST), (top & ~short, logits.shape[1])):
        rows = group.nonzero()[:, 0]
        if len(rows):
            ordered = logits[rows].float().topk(min(width, logits.shape[1]), dim=-1).values
            least = _least(ordered, temperature[rows], top_k[rows], top_p[rows])
            threshold[rows] = threshold[rows].maximum(least)
    return threshold


def _least(ordered: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Of rows in descending order the last that top_k and top_p keep."""
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    limit = torch.where(top_k > 0, top_k, ordered.shape[1])[:, None]
    outside = rank >= limit
    probabilities = (ordered / temperature[:, None]).masked_fill_(outside, float("-inf"))
    probabilities = probabilities.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1).sub_(probabilities)
    goal = torch.where(top_p < 1, top_p, float("inf"))[:, None]
    inside = (rank < limit) & (mass_before < goal)
    last = inside.sum(dim=-1).clamp_(min=1).sub_(1)
    return ordered.gather(1, last[:, None])[:, 0]


def top_threshold_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    room: int = 8192,
    block: int = 4096,
    num_warps: int = 16,
) -> Tensor:
    """One row a program: two readings of it, and 16 of its likely tokens for a top_p, 16 more for a top_k.
    Of all of it, mostly from L2, if more than `room` are likely, or others count."""
    rows, vocab_size = logits.shape
    per_row = (temperature, top_k, top_p, min_p)
    assert logits.stride(1) == 1 and all(
        x.shape == (rows,) and x.stride() == (1,) for x in per_row
    ), (
        f"logits {tuple(logits.shape)} {logits.stride()}, temperature, top_k, top_p, min_p "
        f"{[(tuple(x.shape), x.stride()) for x in per_row]}"
    )
    threshold = torch.empty(rows, dtype=torch.float32, device=logits.device)
    likely = torch.empty(rows, room, dtype=logits.dtype, device=logits.device)
    _top_threshold_kernel[(rows,)](
        logits,
        likely,
        *per_row,
        threshold,
        logits.stride(0),
        vocab_size,
        ROOM=room,
        BLOCK=min(block, triton.next_power_of_2(vocab_size)),
        num_warps=num_warps,
    )
    return threshold


_LOG2_E = tl.constexpr(math.log2(math.e))
_KEY_OF_MINUS_INFINITY = tl.constexpr(0x007FFFFF)


# Of the likeliest token's logit, in temperatures: what is less likely than exp(-12) of it is not copied.
_REACH = tl.constexpr(12.0)


@triton.jit(  # as in `sample.py`
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "thresholds"],
)
def _top_threshold_kernel(
    logits,
    likely,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    thresholds,
    stride,
    vocab_size,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    # How many tokens the goal is about; 0: all
    limit = tl.where(top_k < vocab_size, top_k, 0).to(tl.float32)
    threshold = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0) & ((limit > 0) | (top_p < 1) | (min_p > 0)):
        logits += row * stride
        likely += row * ROOM
        largest = _largest(logits, vocab_size, BLOCK)
        scale = _LOG2_E / temperature
        if (limit > 0) | (top_p < 1):
            least = largest - _REACH * temperature
            count, mass = _copy_likely(
                logits, vocab_size, likely, least, largest, scale, ROOM, BLOCK
            )
            tl.debug_barrier()  # threads read what others have copied
            size = tl.minimum(count, ROOM)
            _, copied = _above(likely, size, largest, scale, float("-inf"), BLOCK)
            enough = tl.where(limit > 0, count >= limit, copied >= mass * top_p)
            if enough & (count <= ROOM):
                threshold = _smallest_kept(likely, size, largest, scale, limit, mass, top_p, BLOCK)
                threshold = tl.maximum(threshold, least)
            else:
                threshold = _smallest_kept(
                    logits, vocab_size, largest, scale, limit, mass, top_p, BLOCK
                )
        if min_p > 0:
            threshold = tl.maximum(threshold, largest + temperature * tl.log(min_p))
        threshold = tl.minimum(threshold, largest)
    tl.store(thresholds + row, threshold)


@triton.jit
def _copy_likely(
    logits, vocab_size, likely, least, largest, scale, ROOM: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies logits from `least` on, as many as there is room for. How many there are, and the sum of
    exp((logit - largest) / temperature) over all."""
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        logit = _load(logits, start, vocab_size, BLOCK)
        is_likely = logit >= least
        place = count + tl.cumsum(is_likely.to(tl.int32), 0) - 1
        tl.store(likely + place, logit, is_likely & (place < ROOM))
        count += tl.sum(is_likely.to(tl.int32), 0)
        mass += tl.exp2((logit - largest) * scale)
    return count, tl.sum(mass, 0)


@triton.jit
def _smallest_kept(logits, size, largest, scale, limit, mass, top_p, BLOCK: tl.constexpr):
    """The smallest logit that top_k and top_p keep; `mass` is that of all tokens."""
    threshold = tl.full((), float("-inf"), tl.float32)
    if limit > 0:
        threshold = _smallest(logits, size, largest, scale, limit, False, BLOCK)
    if top_p < 1:
        if limit > 0:
            # Of the tokens equal to the last of the top_k only so many count
            above, mass = _above(logits, size, largest, scale, threshold, BLOCK)
            equal = tl.exp2((threshold - largest) * scale)
            mass += tl.maximum(limit - above, 0) * equal
        nucleus = _smallest(logits, size, largest, scale, mass * top_p, True, BLOCK)
        threshold = tl.maximum(threshold, nucleus)
    return threshold


@triton.jit
def _largest(logits, vocab_size, BLOCK: tl.constexpr):
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        most = tl.maximum(most, _load(logits, start, vocab_size, BLOCK))
    return tl.max(most, 0)


@triton.jit
def _above(logits, vocab_size, largest, scale, value, BLOCK: tl.constexpr):
    """How many logits lie above `value`, and the sum of exp((logit - largest) / temperature) of them."""
    count = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        logit = _load(logits, start, vocab_size, BLOCK)
        count += tl.where(logit > value, 1.0, 0.0)
        mass += tl.where(logit > value, tl.exp2((logit - largest) * scale), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _smallest(logits, vocab_size, largest, scale, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest value above which lies less than `goal`: of `_above`'s mass, or its number."""
    key = tl.zeros((), tl.uint32)
    step = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        first, second = _value(key + step - 1), _value(key + 2 * step - 1)
        third = _value(key + 3 * step - 1)
        above_first = tl.zeros((BLOCK,), tl.float32)
        above_second = tl.zeros((BLOCK,), tl.float32)
        above_third = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            logit = _load(logits, start, vocab_size, BLOCK)
            weight = tl.exp2((logit - largest) * scale) if BY_MASS else 1.0
            above_first += tl.where(logit > first, weight, 0.0)
            above_second += tl.where(logit > second, weight, 0.0)
            above_third += tl.where(logit > third, weight, 0.0)
        # What lies above falls from one to the next: how many reach the goal is the digit
        reached = (tl.sum(above_first, 0) >= goal).to(tl.uint32)
        reached += (tl.sum(above_second, 0) >= goal).to(tl.uint32)
        reached += (tl.sum(above_third, 0) >= goal).to(tl.uint32)
        key += reached * step
        step = step >> 2
    return _value(key)


@triton.jit
def _value(key):
    """The float32 of a key: keys are in the order of their floats, -inf for those below all."""
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    value = bits.to(tl.float32, bitcast=True)
    return tl.where(key <= _KEY_OF_MINUS_INFINITY, float("-inf"), value)


@triton.jit
def _load(logits, start, vocab_size, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    loaded = tl.load(logits + column, column < vocab_size, other=float("-inf"))
    return loaded.to(tl.float32)
