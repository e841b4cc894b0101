"""The routed experts of a mixture.

On a GPU one or two tokens stream the weights of each pair's expert (`gemv.py`). More tokens are sorted by expert
(`align.py`) for grouped matrix products (`gate_up_gemm.py`, `down_gemm.py`), whose results are then summed
(`combine.py`). Both can compute the shared experts as well. With plain torch tokens are sorted, and each projection is
one grouped product over the stacked weights (Gale et al., 2022, arXiv:2211.15841). Quantized weights have products of
their own (`quantized_experts.py`). A GPU without kernels for them dequantizes them first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.moe.align import blocks_for
from mla_router.worker.kernels.moe.combine import Term, combine, weighted_sum
from mla_router.worker.kernels.moe.down_gemm import down_blocks
from mla_router.worker.kernels.moe.gate_up_gemm import gate_up_blocks
from mla_router.worker.kernels.moe.gemv import down_pairs, gate_up_pairs
from mla_router.worker.kernels.moe.quantized_experts import (
    quantized_experts,
    quantized_experts_torch,
    takes,
    takes_shared_quantized,
)
from mla_router.worker.kernels.moe.shared import SharedWeights
from mla_router.worker.kernels.moe.tiling import MoeShape, MoeTiling, moe_tiling
from mla_router.worker.kernels.silu_and_mul import silu_and_mul
from mla_router.worker.kernels.tuned import device_name
from mla_router.worker.kernels.weight import Activations, Weight, dense_rows

_ROW_BYTES = 16

# A function that returns a term, or the weights of shared experts of all tokens
Plus = Callable[[], Term] | SharedWeights | None


def moe_experts(
    x: Activations,
    gate_up: Weight,
    down: Weight,
    weights: Tensor,
    ids: Tensor,
    plus: Plus = None,
    *,
    total: int | None = None,
) -> Tensor:
    """Returns plus + the sum over k of weights[t, k] * expert ids[t, k] (x[t]), [T, N] in x's dtype.

    x [T, N], gate_up [E, 2I, N], down [E, N, I], the plain ones of one dtype; weights [T, K] float32, ids [T, K]
    int32, distinct within a token. Id -1 with weight 0 stands for no expert. The sum is in float32 and in the order
    of k, so that a token's result does not depend on the other tokens of the batch (only on their number, by which
    the tiling is chosen). `plus` is a function whose result has rows in x's dtype. It is called as late as
    possible: it may wait for work that runs beside. Where `takes_shared`, `plus` may be weights. `total` is the number of
    experts of all ranks, among which a token chooses; by default E.

    On CUDA nothing waits for the device if the dtype has 16 bits; for others torch's grouped_mm
    reads the group sizes back.
    """
    if not on_gpu(x) and not (gate_up.is_plain and down.is_plain):
        x = dense_rows(x)
        if isinstance(plus, SharedWeights):
            plus = partial(_shared_torch, x, plus)
        return quantized_experts_torch(x, gate_up, down, weights, ids, plus, total)
    tokens, hidden = x.shape
    experts, double, _ = gate_up.values.shape
    assert gate_up.values.shape == (experts, double, hidden) and down.values.shape == (
        experts,
        hidden,
        double // 2,
    ), f"x {tuple(x.shape)}, gate_up {tuple(gate_up.values.shape)}, down {tuple(down.values.shape)}"
    assert weights.shape == ids.shape and ids.shape[0] == tokens, (
        f"x {tuple(x.shape)}, weights {tuple(weights.shape)}, ids {tuple(ids.shape)}"
    )
    if tokens and takes(x, gate_up, down):
        if isinstance(plus, SharedWeights):
            return quantized_experts(x, gate_up, down, weights, ids, shared=plus)
        return quantized_experts(x, gate_up, down, weights, ids, plus, total=total)
    x = dense_rows(x)
    ups, downs = gate_up.dense(x.dtype).values, down.dense(x.dtype).values
    if on_gpu(x) and tokens:
        return moe_experts_triton(x, ups, downs, weights, ids, plus)
    return moe_experts_torch(x, ups, downs, weights, ids, plus)


def moe_experts_torch(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    plus: Plus = None,
) -> Tensor:
    if isinstance(plus, SharedWeights):
        plus = partial(_shared_torch, x, plus)
    tokens, hidden = x.shape
    experts, top_k = len(gate_up), ids.shape[1]
    # Pairs without an expert are last, after all groups
    sorted_ids, order = torch.where(ids < 0, experts, ids).flatten().sort(stable=True)
    ends = torch.searchsorted(
        sorted_ids,
        torch.arange(experts, dtype=ids.dtype, device=x.device),
        right=True,
        out_int32=True,
    )
    rows = x.index_select(0, order // top_k)
    rows = _grouped_linear(silu_and_mul(_grouped_linear(rows, gate_up, ends)), down, ends)

    unsorted = torch.empty_like(rows).index_copy_(0, order, rows).view(tokens, top_k, hidden)
    return weighted_sum(unsorted.masked_fill_((ids < 0)[..., None], 0.0), weights, plus)


def takes_shared(x: Activations, gate_up: Weight, shared: SharedWeights) -> bool:
    """Whether shared experts run best in the kernels of the routed experts [E, 2I, N].

    They do for one token, and for prompts of medium length (docs/design/kernel_choices.md). Otherwise they run on a second
    stream (`beside.py`). The kernels read only constant weights, all of them plain; those of one token also read weights
    quantized with the same blocks.
    """
    tokens, experts, width = x.shape[0], len(gate_up.values), gate_up.values.shape[1] // 2
    shared_width = shared.down.values.shape[1]
    if not on_gpu(x) or shared_width % width:
        return False
    all_weights = (gate_up, *shared)
    if not all(weight.constant for weight in all_weights):
        return False
    if not all(weight.is_plain for weight in all_weights):
        return tokens == 1 and takes_shared_quantized(x, *all_weights)
    some_rows = max(256, 5 * experts) < tokens <= 24 * experts
    return tokens == 1 or (some_rows and shared_width > width)


def moe_experts_triton(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    plus: Plus = None,
    *,
    tiling: MoeTiling | None = None,
) -> Tensor:
    """Takes at least one token. `tiling` is by default chosen by device and shape (`tiling.py`). Shared weights need a
    tiling with fewer rows in a block than tokens, or with unsorted pairs."""
    tokens, hidden = x.shape
    experts, double, _ = gate_up.shape
    assert gate_up.is_contiguous() and down.is_contiguous() and weights.is_contiguous()
    x, ids = x.contiguous(), ids.contiguous()
    if tiling is None:
        shape = MoeShape(experts, hidden, double // 2, x.dtype)
        on = limits(x.device)
        tiling = moe_tiling(device_name(x.device), shape, tokens, ids.shape[1], on)
    if tiling.rows == 1:
        shared = plus if isinstance(plus, SharedWeights) else None
        gated = gate_up_pairs(x, gate_up, ids, tiling.gate_up, shared and shared.gate_up.values)
        added = plus().padded(tokens) if callable(plus) else None
        return down_pairs(
            gated, down, weights, ids, tiling.down, added, shared and shared.down.values
        )
    blocks = blocks_for(ids, experts, tiling.rows)
    shared = plus if isinstance(plus, SharedWeights) else None
    gated_rows = gate_up_blocks(
        x, gate_up, blocks, tiling.gate_up, shared and shared.gate_up.values
    )
    rows = down_blocks(gated_rows, down, blocks, tiling.down, shared and shared.down.values)
    of_shared = Term(rows[ids.numel() :]) if shared else None
    return combine(rows, weights, plus() if callable(plus) else of_shared)


def _grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Returns the product [R, M] of rows [R, N], sorted by expert, and their experts' weights [E, M, N]; `ends` [E] int32
    are the ends of the groups. torch's grouped_mm needs rows of a multiple of 16 bytes: others are padded with zeros."""
    short = -rows.shape[1] % (_ROW_BYTES // rows.itemsize)
    if short:
        rows, weights = functional.pad(rows, (0, short)), functional.pad(weights, (0, short))
    return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def _shared_torch(x: Tensor, shared: SharedWeights) -> Term:
    gate_up, down = (weight.dense(x.dtype).values for weight in shared)
    return Term(functional.linear(silu_and_mul(functional.linear(x, gate_up)), down))
