"""top_k, top_p and min_p as one threshold for the logits of each row.

Equally likely tokens stay or go together, so a draw does not depend on the order of ties, which are frequent in
bfloat16. Nucleus sampling: Holtzman et al., 2019, arXiv:1904.09751; min_p: Nguyen et al., 2024, arXiv:2407.01082.

The kernel does not sort. The number of tokens above a value, and their probability, fall as the value rises. So the
smallest value with less than a goal above it is found digit by digit, two bits in one pass over the row: a radix
select. If the likely tokens are few, as with a trained model, they are copied first, and only the copies are read
again.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# The torch function does not sort rows with a top_k of at most this: it selects their largest logits. All of them have
# one size, since sums over rows of another size round differently, and results would depend on the batch.
SHORTLIST = 1024


def top_threshold(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Returns the smallest logit that stays in each row of `logits` [R, V] float32 or bfloat16, [R] float32.

    The `top_k` [R] int64 largest stay (0: all), of these the smallest set whose share of
    softmax(logits / temperature) over them reaches `top_p` [R] (1: all), and of these the tokens at least
    `min_p` [R] times as likely as the likeliest, which always stays. `temperature`, `top_p` and `min_p`
    are float32. The threshold is -inf for rows of temperature 0 and for rows without limits, and undefined for
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
    """Returns the last logit that top_k and top_p keep, of rows in descending order."""
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
    """Launches a program for each row: two passes over it, then 16 over its likely tokens for a top_p, and 16 for a
    top_k. If more than `room` tokens are likely, or unlikely ones matter, these passes are over the row, mostly in L2."""
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


# In temperatures below the largest logit: tokens less likely than exp(-12) of the likeliest are not copied.
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
            tl.debug_barrier()  # threads read the copies of other threads
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
    """Copies logits of at least `least`, as many as there is room for. Returns their number, and the sum of
    exp((logit - largest) / temperature) over all logits."""
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
    """Returns the smallest logit that top_k and top_p keep; `mass` is the sum over all tokens."""
    threshold = tl.full((), float("-inf"), tl.float32)
    if limit > 0:
        threshold = _smallest(logits, size, largest, scale, limit, False, BLOCK)
    if top_p < 1:
        if limit > 0:
            # Only some of the tokens equal to the last of the top_k count
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
    """Returns the number of logits above `value`, and their sum of exp((logit - largest) / temperature)."""
    count = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        logit = _load(logits, start, vocab_size, BLOCK)
        count += tl.where(logit > value, 1.0, 0.0)
        mass += tl.where(logit > value, tl.exp2((logit - largest) * scale), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _smallest(logits, vocab_size, largest, scale, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the smallest value with less than `goal` above it: of `_above`'s sum, or of its number."""
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
        # The amount above falls from one candidate to the next: the number of candidates that reach the goal is the digit
        reached = (tl.sum(above_first, 0) >= goal).to(tl.uint32)
        reached += (tl.sum(above_second, 0) >= goal).to(tl.uint32)
        reached += (tl.sum(above_third, 0) >= goal).to(tl.uint32)
        key += reached * step
        step = step >> 2
    return _value(key)


@triton.jit
def _value(key):
    """Returns the float32 of a key: keys have the order of their floats; -inf for keys below all."""
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    value = bits.to(tl.float32, bitcast=True)
    return tl.where(key <= _KEY_OF_MINUS_INFINITY, float("-inf"), value)


@triton.jit
def _load(logits, start, vocab_size, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    loaded = tl.load(logits + column, column < vocab_size, other=float("-inf"))
    return loaded.to(tl.float32)
