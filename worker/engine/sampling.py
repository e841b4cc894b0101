"""Draw one token for every row of logits.

Sampling is the Gumbel-max trick: argmax(logits / T + g) with g = -log(-log u) draws from
softmax(logits / T). The noise is not taken from a generator but computed from (seed, position,
token id), so a request's random sequence depends on nothing else: not on its batch, its slot or the
number of workers, and it can be taken up again at any position.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Odd 64-bit constants (SplitMix64, Steele et al. 2014), as the signed integers torch has.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
    *,
    filtered: bool,
) -> Tensor:
    """Sample from `logits` [R, V] float32 as each row's settings [R] say; returns [R] int64.

    `position` is where in its sequence the new token will stand. Rows with temperature 0 are
    greedy. `filtered` tells that some row uses top_k or top_p, which cost a sort.
    """
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if filtered:
        scaled = _keep_top(scaled, top_k, top_p)
    noise = _gumbel(seed, position, logits.shape[1])
    noisy = torch.where(temperature[:, None] > 0, scaled + noise, logits)
    return noisy.argmax(dim=-1)


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Natural log of the model's own probability of `tokens` [R], before temperature; [R] float32."""
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return chosen - logits.logsumexp(dim=-1)


def _keep_top(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set to -inf what lies outside each row's top_k largest, and then outside the smallest set of
    those whose probabilities reach top_p. The most likely token always stays."""
    ordered, order = scaled.sort(dim=-1, descending=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    limit = torch.where(top_k > 0, top_k, scaled.shape[1])
    ordered = ordered.masked_fill(rank >= limit[:, None], float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    outside = (mass_before >= top_p[:, None]) & (rank > 0)
    ordered = ordered.masked_fill(outside, float("-inf"))
    return torch.empty_like(scaled).scatter_(1, order, ordered)


def _gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """[R, V] float32 standard Gumbel noise, a pure function of seed, position and token id."""
    token = torch.arange(vocab_size, device=seed.device)
    row = _mix(_mix(seed) + position * _GOLDEN)
    bits = _mix(row[:, None] + token * _GOLDEN)
    # 23 bits and a half: never 0 or 1 in float32, where the logarithms would be infinite.
    uniform = ((_shift(bits, 41)).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer; multiplication of int64 wraps around."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
