"""A layer of experts behind the exchange of DP ranks, for the processes of `support.ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from mla_router.worker.kernels.comm.connect import Meeting
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.comm.groups import Groups
from mla_router.worker.kernels.quantize import GROUP, quantize_rows_torch
from mla_router.worker.kernels.weight import RowForm
from mla_router.worker.model.deepseek import DeepseekForCausalLM
from mla_router.worker.model.exchange import Exchange, Way
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


def both_ways(
    group: Group,
    folder: Path,
    counts: Sequence[int],
    dtype: torch.dtype,
    form: RowForm | None = None,
) -> tuple[Tensor, Tensor, bool]:
    """Returns the results of own rows if all rows are gathered, the results if rows go only to the ranks of their experts, and
    whether the latter are sent quantized. Each rank has half of the experts, with random weights. `form` of the rows: by
    default the form that the experts take."""
    with pytest.MonkeyPatch.context() as patch:
        if form is not None:
            patch.setattr(Experts, "row_form", lambda _layer, _rows: form)
        return _both_ways(group, folder, tuple(counts), dtype, str(form))


def _both_ways(
    group: Group, folder: Path, counts: tuple[int, ...], dtype: torch.dtype, name: str
) -> tuple[Tensor, Tensor, bool]:
    device = torch.device("cpu" if group.backend == "gloo" else f"cuda:{group.rank}")
    results, forms = [], []
    for all_to_all in (False, True):
        store = FileStore(str(folder / f"store {name} {counts} {all_to_all}"), -1)
        groups = Groups.join(
            group.rank,
            group.size,
            Meeting(store, device),
            dp_size=group.size,
            all_to_all=all_to_all,
        )
        model = load_model(
            folder,
            device=device,
            dtype=dtype,
            dummy=True,
            groups=groups,
            expert_parts=group.size,
        )
        layer = model.model.last
        experts, norm = layer.mlp, layer.post_attention_layernorm
        assert isinstance(experts, MixtureOfExperts)
        exchange = Exchange(None, groups.exchange, counts)
        draw = torch.Generator().manual_seed(group.rank)
        shape = 2, counts[group.rank], model.config.hidden_size
        rows, residual = torch.randn(shape, generator=draw).to(device, dtype)
        forms.append(experts.form_of_all(exchange))
        assert (experts.way(rows, forms[-1], exchange) is Way.DISPATCH) == all_to_all
        with torch.inference_mode():
            results.append(experts.after_norm(norm, rows, residual, exchange)[0].cpu())
    return results[0], results[1], forms[1].quantized is not None


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
