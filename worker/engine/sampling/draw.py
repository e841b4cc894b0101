"""Draw one token for every row of logits.

This is the Gumbel-max trick: argmax(logits / T + g) with g = -log(-log u) draws from
softmax(logits / T).
"""

from __future__ import annotations

from enum import Enum

from torch import Tensor

from mla_router.worker.engine.sampling.filters import keep_min_p, keep_top
from mla_router.worker.engine.sampling.settings import RowSettings
from mla_router.worker.kernels.noise import gumbel


class Top(Enum):
    """What is to be known of a batch's order, the dearest last."""

    ALL = "neither top_k nor top_p"
    SHORTLIST = "every row has a top_k of at most `filters.SHORTLIST`"
    SORTED = "any top_k and top_p"


def draw(
    logits: Tensor, settings: RowSettings, positions: Tensor, *, top: Top, min_p: bool
) -> tuple[Tensor, Tensor]:
    """The drawn token of each row of `logits` [R, V] float32, and what it scored in the draw.

    `settings` have temperatures above 0; `positions` [R] int64 are where the new tokens will stand.
    `min_p` tells that some row uses it. Returns [R] float32, [R]
    int64; a score that is not finite means that there was nothing to draw.
    """
    scaled = logits / settings.temperature[:, None]
    if top is not Top.ALL:
        short = top is Top.SHORTLIST
        scaled = keep_top(scaled, settings.top_k, settings.top_p, short=short)
    if min_p:
        scaled = keep_min_p(scaled, settings.min_p)
    noise = gumbel(settings.seed, positions, logits.shape[1])
    score, token = noise.add_(scaled).max(dim=-1)
    return score, token
