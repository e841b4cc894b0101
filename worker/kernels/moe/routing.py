"""Choice of experts for each token.

Three published rules are cases of one formula:
- DeepSeek-V2-Lite, "greedy": softmax scores, the top k of all experts.
- DeepSeek-V2 (arXiv:2405.04434, section 2.2), "group_limited_greedy": the best groups by their
  best expert, then the top k experts within them.
- DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), "noaux_tc": sigmoid scores; a learned bias that
  balances the load takes part in the choice, not in the weights; groups by their two best.

The Triton kernel keeps the scores of a token in the registers of one program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, start_next, wait_for_previous


@dataclass(frozen=True)
class RoutingRule:
    """The choice of `top_k` experts for each token, from its `top_groups` of `num_groups`. With `normalize` a token's
    weights sum to 1 before they are multiplied by `scale`."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = False
    scale: float = 1.0


def moe_routing(
    logits: Tensor,
    rule: RoutingRule,
    bias: Tensor | None = None,
    out_cache_loc: Tensor | None = None,
    *,
    table: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns weights [T, top_k] float32 and expert ids [T, top_k] int32, in no particular order.

    logits [T, E] float32, bias [E] float32 (sigmoid only), out_cache_loc [T] int64: the cache row of each token.
    Row 0 marks an idle row, which pads a CUDA graph. It has no expert: ids -1, weights 0.

    table [E, C] int32, contiguous: on a rank with some of the experts, expert e has the id table[e, t % C] in row t. -1:
    another rank computes the pair, whose weight is 0 here. counts [E] int64: the pairs of each expert, of all ranks, are
    added to it.
    """
    experts, groups = logits.shape[-1], rule.num_groups
    assert logits.dtype == torch.float32 and experts % groups == 0, (
        f"logits {tuple(logits.shape)} {logits.dtype}, {groups} groups"
    )
    assert rule.top_groups <= groups and rule.top_k <= rule.top_groups * (experts // groups), (
        f"{rule.top_k} of {experts} experts in {rule.top_groups} of {groups} groups"
    )
    route = moe_routing_triton if logits.is_cuda else moe_routing_torch
    return route(logits, rule, bias, out_cache_loc, table=table, counts=counts)


def moe_routing_torch(
    logits: Tensor,
    rule: RoutingRule,
    bias: Tensor | None = None,
    out_cache_loc: Tensor | None = None,
    *,
    table: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    softmax = rule.scoring == "softmax"
    scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()
    choice = scores if bias is None else scores + bias

    if rule.top_groups < rule.num_groups:
        shape = len(choice), rule.num_groups, choice.shape[1] // rule.num_groups
        grouped = choice.view(shape)
        best = grouped.topk(1 if softmax else 2, dim=-1).values.sum(dim=-1)
        groups = best.topk(rule.top_groups, dim=-1, sorted=False).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, groups, False)
        choice = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(-2)

    ids = choice.topk(rule.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, ids)
    if rule.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights, is_dropped = weights * rule.scale, torch.zeros_like(ids, dtype=torch.bool)
    if out_cache_loc is not None:
        is_dropped |= (out_cache_loc == 0)[:, None]
    if counts is not None:
        counts.index_add_(0, ids.flatten(), (~is_dropped).flatten().to(counts.dtype))
    if table is not None:
        row = torch.arange(len(ids), device=ids.device)
        ids = table[ids, (row % table.shape[1])[:, None]]
        is_dropped |= ids < 0
    return weights.masked_fill(is_dropped, 0.0), ids.int().masked_fill(is_dropped, -1)


@triton.jit(do_not_specialize_on_alignment=["out_cache_loc"])
def _route(
    logits,
    bias,
    out_cache_loc,
    table,
    counts,
    weights,
    ids,
    scale,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    start_next()
    SIZE: tl.constexpr = EXPERTS // GROUPS
    NEVER: tl.constexpr = float("-inf")
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    logits += token * EXPERTS
    group = tl.arange(0, BLOCK_GROUPS)[:, None]
    member = tl.arange(0, BLOCK_SIZE)[None, :]
    expert = group * SIZE + member
    exists = (group < GROUPS) & (member < SIZE)
    is_idle = False
    if out_cache_loc is not None:
        is_idle = tl.load(out_cache_loc + token) == 0
    logit = tl.load(logits + expert, exists, other=NEVER)
    highest = tl.max(tl.max(logit, axis=1), axis=0)
    total = tl.sum(tl.sum(tl.exp(logit - highest), axis=1), axis=0)
    choice = 1 / (1 + tl.exp(-logit)) if SIGMOID else tl.exp(logit - highest) / total
    if BIASED:
        choice += tl.load(bias + expert, exists, other=0.0)
    # Comparisons with NaN are false. This number is above the value of excluded experts, so that the ids of a token
    # with NaN are still distinct experts.
    choice = tl.where(choice != choice, -1e30, choice)  # noqa: PLR0124
    choice = tl.where(exists, choice, NEVER)

    if TOP_GROUPS < GROUPS:
        merit = tl.max(choice, axis=1)
        if SIGMOID:
            first = tl.argmax(choice, axis=1)
            merit += tl.max(tl.where(member == first[:, None], NEVER, choice), axis=1)
        groups = tl.arange(0, BLOCK_GROUPS)
        kept = groups < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.argmax(tl.where(kept, NEVER, merit), axis=0)
            kept |= groups == best
        choice = tl.where(kept[:, None], choice, NEVER)

    choice = tl.reshape(choice, (BLOCK_GROUPS * BLOCK_SIZE,))
    place = tl.arange(0, BLOCK_GROUPS * BLOCK_SIZE)
    column = tl.arange(0, BLOCK_COLUMNS)
    chosen = column
    for k in tl.static_range(TOP_K):
        best = tl.argmax(choice, axis=0)
        choice = tl.where(place == best, NEVER, choice)
        chosen = tl.where(column == k, best // BLOCK_SIZE * SIZE + best % BLOCK_SIZE, chosen)

    # Scores of the chosen experts are computed again: that is cheaper than a reduction for each
    routed = column < TOP_K
    logit = tl.load(logits + chosen, routed, other=0.0)
    score = 1 / (1 + tl.exp(-logit)) if SIGMOID else tl.exp(logit - highest) / total
    if NORMALIZE:
        score = score / (tl.sum(tl.where(routed, score, 0.0), axis=0) + 1e-20)
    if counts is not None:
        tl.atomic_add(counts + chosen, tl.where(is_idle, 0, 1), routed, sem="relaxed")
    dropped = is_idle
    if table is not None:
        chosen = tl.load(table + chosen * COLUMNS + token % COLUMNS, routed, other=-1)
        dropped = (chosen < 0) | is_idle
    out = token * TOP_K + column
    tl.store(weights + out, tl.where(dropped, 0.0, score * scale), routed)
    tl.store(ids + out, tl.where(dropped, -1, chosen), routed)


def moe_routing_triton(
    logits: Tensor,
    rule: RoutingRule,
    bias: Tensor | None = None,
    out_cache_loc: Tensor | None = None,
    *,
    table: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launches a program for each token."""
    tokens, experts = logits.shape
    assert out_cache_loc is None or (
        out_cache_loc.shape == (tokens,) and out_cache_loc.is_contiguous()
    ), f"logits {tuple(logits.shape)}, {out_cache_loc.shape=}, {out_cache_loc.stride()=}"
    weights = logits.new_empty(tokens, rule.top_k)
    ids = torch.empty_like(weights, dtype=torch.int32)
    if tokens:
        _route[(tokens,)](
            logits.contiguous(),
            bias,
            out_cache_loc,
            table,
            counts,
            weights,
            ids,
            rule.scale,
            **constants(experts, rule, bias is not None),
            COLUMNS=1 if table is None else table.shape[1],
            **launch_options(),
        )
    return weights, ids


def constants(experts: int, rule: RoutingRule, biased: bool) -> dict[str, Any]:
    """Returns the kernel's constants. It has one warp if a lane has at most 16 scores."""
    groups = triton.next_power_of_2(rule.num_groups)
    size = triton.next_power_of_2(experts // rule.num_groups)
    return {
        "EXPERTS": experts,
        "TOP_K": rule.top_k,
        "SIGMOID": rule.scoring == "sigmoid",
        "BIASED": biased,
        "GROUPS": rule.num_groups,
        "TOP_GROUPS": rule.top_groups,
        "NORMALIZE": rule.normalize,
        "BLOCK_GROUPS": groups,
        "BLOCK_SIZE": size,
        "BLOCK_COLUMNS": triton.next_power_of_2(rule.top_k),
        "num_warps": 1 if groups * size <= 512 else 4,
    }
