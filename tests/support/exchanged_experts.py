"""A layer of experts behind the exchange of DP ranks, for the processes of `support.ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.quantize import GROUP, quantize_rows_torch
from mla_router.worker.kernels.weight import RowForm
from mla_router.worker.model.deepseek import DeepseekForCausalLM
from mla_router.worker.model.exchange import Exchange
from mla_router.worker.model.experts import Experts
from mla_router.worker.model.layers import RMSNorm
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.moe import MixtureOfExperts

FORM = RowForm(plain=False, quantized=torch.float8_e4m3fn)


def sent_quantized(group: Group, folder: Path, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the results of own rows, each rank with all routed experts, and those that separate ops of this process give.
    The rows are sent quantized, as on GPUs with quantized experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "row_form", lambda _layer, _rows: FORM)
        return _results(group, folder, tuple(counts))


def _results(group: Group, folder: Path, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(model, DeepseekForCausalLM)
    layer = model.model.last
    experts, norm = layer.mlp, layer.post_attention_layernorm
    assert isinstance(experts, MixtureOfExperts)
    exchange = Exchange(None, group, counts)
    width = model.config.hidden_size
    rows, residual = torch.randn(
        2, counts[group.rank], width, generator=torch.Generator().manual_seed(group.rank)
    )
    assert exchange.sends_quantized(rows, FORM)
    with torch.inference_mode():
        if len(rows):
            result, total = experts.after_norm(norm, rows, residual, exchange)
            assert torch.equal(total, rows + residual)
        else:
            experts.serve(exchange)
            result = rows
        return result, _alone(experts, norm, rows + residual, group.size)


def _alone(experts: MixtureOfExperts, norm: RMSNorm, rows: Tensor, ranks: int) -> Tensor:
    """The shared experts take own rows, which are not sent."""
    if not len(rows):
        return rows
    normed = norm(rows)
    weights, ids = experts.gate(normed)
    rounded = quantize_rows_torch(normed, torch.float8_e4m3fn, GROUP).dense()
    assert experts.shared_experts is not None
    shared: Tensor = experts.shared_experts(normed)
    return ranks * experts.experts(rounded, weights, ids) + shared
