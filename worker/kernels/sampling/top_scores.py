"""The tokens with the largest scores of each row of logits: the candidates of a tree of drafts.

A score is logits / temperature plus the noise of `sample.py`, without noise if the temperature is 0. So the first token is
the one that `sample` draws, and all are a draw without replacement (Gumbel-top-k; Kool et al., 2019, arXiv:1903.06059).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.sampling.noise import gumbel


def top_scores(
    logits: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Returns the `count` best tokens of each row of `logits` [R, V], best first, [R, count] int64, and the logarithms of
    their shares in softmax(scores), float32. `positions` [R] int32: of these tokens. `temperature` [R] float32, `seed` [R]
    int64. The arithmetic is float32."""
    return top_scores_torch(logits, positions, temperature, seed, count)


def top_scores_torch(
    logits: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    draws = (temperature > 0)[:, None]
    scores = logits.float() / torch.where(draws, temperature[:, None], 1.0)
    noise = gumbel(seed, positions.long(), logits.shape[1])
    scores = torch.where(draws, scores + noise, scores)
    best, tokens = scores.topk(count)
    return tokens, best - scores.logsumexp(dim=1, keepdim=True)
