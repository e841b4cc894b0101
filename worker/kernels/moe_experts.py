"""The feed-forward experts of a mixture, each token through the ones it was routed to.

Tokens are sorted by expert, so that each projection is one grouped matrix product over the
stacked weights (Gale et al., 2022, arXiv:2211.15841).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.silu_and_mul import silu_and_mul


def moe_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """sum over k of weights[t, k] * expert ids[t, k] (x[t]).

    x [T, H], gate_up [E, 2I, H], down [E, H, I] of one dtype; weights [T, K] float32, ids [T, K]
    int64, distinct within a token. The result is [T, H] in x's dtype, summed in float32 and in the
    order of k, so that it does not depend on what else is in the batch.

    On CUDA nothing waits for the device if the dtype is bfloat16; for others torch's grouped_mm
    reads the group sizes back.
    """
    tokens, hidden = x.shape
    experts, double, _ = gate_up.shape
    assert gate_up.shape == (experts, double, hidden) and down.shape == (
        experts,
        hidden,
        double // 2,
    ), f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}"
    assert weights.shape == ids.shape and ids.shape[0] == tokens, (
        f"x {tuple(x.shape)}, weights {tuple(weights.shape)}, ids {tuple(ids.shape)}"
    )
    top_k = ids.shape[1]
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(
        sorted_ids, torch.arange(experts, device=x.device), right=True, out_int32=True
    )
    rows = x.index_select(0, order // top_k)
    rows = silu_and_mul(functional.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends))
    rows = functional.grouped_mm(rows, down.transpose(1, 2), offs=ends)

    unsorted = torch.empty_like(rows).index_copy_(0, order, rows)
    return torch.einsum("tkh,tk->th", unsorted.view(tokens, top_k, hidden).float(), weights).to(
        x.dtype
    )
