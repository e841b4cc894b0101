"""Choice of experts for each token.

Three published rules are one formula with different parts:
- DeepSeek-V2-Lite, "greedy": softmax scores, the top k of all experts.
- DeepSeek-V2 (arXiv:2405.04434, section 2.2), "group_limited_greedy": the best groups by their
  best expert, then the top k experts within them.
- DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), "noaux_tc": sigmoid scores; a learned bias that
  balances the load takes part in the choice, not in the weights; groups by their two best.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def moe_routing(
    logits: Tensor,
    *,
    top_k: int,
    scoring: Literal["softmax", "sigmoid"],
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Weights [T, top_k] float32 and expert ids [T, top_k] int64, in no particular order.

    logits [T, E] float32, bias [E] float32 (sigmoid only). With `normalize` the weights of a token
    sum to 1 before they are multiplied by `scale`.
    """
    experts = logits.shape[-1]
    assert logits.dtype == torch.float32 and experts % num_groups == 0, (
        f"logits {tuple(logits.shape)} {logits.dtype}, {num_groups} groups"
    )
    assert top_groups <= num_groups and top_k <= top_groups * (experts // num_groups), (
        f"{top_k} of {experts} experts in {top_groups} of {num_groups} groups"
    )
    scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias

    if top_groups < num_groups:
        grouped = choice.view(*choice.shape[:-1], num_groups, -1)
        best = grouped.topk(1 if scoring == "softmax" else 2, dim=-1).values.sum(dim=-1)
        groups = best.topk(top_groups, dim=-1, sorted=False).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, groups, False)
        choice = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(-2)

    ids = choice.topk(top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids
