"""The unlikely tokens that top_k, top_p and min_p take out of the draw.

What remains is told by a threshold, not by places in a sorted list: tokens that are equally likely
stay or go together, so ties (frequent in bfloat16) cannot make a draw depend on a sort's whims.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows whose top_k is at most this are not sorted whole: their largest logits are looked for. One width for
# all of them, since sums over rows of another width round differently, and a batch would show.
SHORTLIST = 1024


def keep_top(scaled: Tensor, top_k: Tensor, top_p: Tensor, *, short: bool) -> Tensor:
    """[R, V] with -inf for what lies outside each row's `top_k` [R] largest (0: all of them), and
    then outside the smallest set of those whose probabilities reach `top_p` [R] (nucleus sampling,
    arXiv:1904.09751). The most likely token always stays. `short`: every top_k is in 1 .. SHORTLIST.
    """
    if short:
        ordered = scaled.topk(min(SHORTLIST, scaled.shape[1]), dim=-1).values
    else:
        ordered = scaled.sort(dim=-1, descending=True).values
    rank = torch.arange(ordered.shape[1], device=scaled.device)
    limit = torch.where(top_k > 0, top_k, scaled.shape[1])
    probabilities = ordered.masked_fill(rank >= limit[:, None], float("-inf")).softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1).sub_(probabilities)
    inside = (rank < limit[:, None]) & (mass_before < top_p[:, None])
    last = inside.sum(dim=-1).clamp_(min=1).sub_(1)
    threshold = ordered.gather(1, last[:, None])
    return scaled.masked_fill(scaled < threshold, float("-inf"))


def keep_min_p(scaled: Tensor, min_p: Tensor) -> Tensor:
    """[R, V] with -inf for tokens less likely than `min_p` [R] times the most likely one
    (arXiv:2407.01082). Other filters do not change these ratios: the order does not matter."""
    threshold = scaled.amax(dim=-1) + min_p.log()
    return scaled.masked_fill(scaled < threshold[:, None], float("-inf"))
