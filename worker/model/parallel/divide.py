"""Divides a model among ranks: each linear layer by its name in checkpoints.

A rank has some attention heads, some columns of each feed-forward layer, some experts, and some rows of the head. The
products after heads and columns, `o_proj` and `down_proj`, take parts of their inputs, so the results of the ranks are
summed: once after the attention of a layer, and once after its feed-forward half, where routed and shared experts are
one sum. Logits are gathered.

With DP attention this holds for the ranks of each DP rank, except for routed experts, which all ranks together divide.
The results of layers with experts are summed over one rank of each DP rank (`model/exchange.py`), and then within the
DP rank as above.

All else is the same on every rank. So is the embedding: a divided one would need a sum before the first layer, to save
little compared with the layers' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from mla_router.worker.kernels.comm.groups import Groups
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.eagle import EagleHead
from mla_router.worker.model.layers import RMSNorm
from mla_router.worker.model.linear import Linear, LinearShape
from mla_router.worker.model.moe import Gate, MixtureOfExperts
from mla_router.worker.model.mtp import MultiTokenPrediction
from mla_router.worker.model.parallel.placement import Placement, trivial
from mla_router.worker.model.parallel.ranks import Ranks, Share
from mla_router.worker.model.shard import Extent, Members
from mla_router.worker.model.weight_mapping import checkpoint_layers

Config = TypeVar("Config", bound=ModelConfig)


class Axis(NamedTuple):
    """An axis of `size` numbers, of the weight of layer `name` of the checkpoint."""

    name: str
    size: int
    columns: Share  # of this rank in the columns of the layer
    block: int  # numbers that share scales

    def of_items(self, share: Share, items: int) -> Extent:
        """Returns the numbers of a share of `items`, which have equally many. Raises ModelError."""
        own, each = share.of(items, self.name), self.size // items
        extent = Extent(own.start * each, own.length * each, self.size)
        ends_at_block = extent.end % self.block == 0 or extent.end == self.size
        if extent.start % self.block or not ends_at_block:
            raise ModelError(
                f"{self.name}: {extent.length} of {self.size} are no whole blocks of {self.block} that share scales: "
                f"change {share.remedy}"
            )
        return extent


def _heads(axis: Axis, config: ModelConfig, ranks: Ranks) -> Extent:
    return axis.of_items(ranks.attention, config.num_heads)


def _kv_heads(axis: Axis, config: ModelConfig, ranks: Ranks) -> Extent:
    heads = _num_kv_heads(config)
    return axis.of_items(ranks.kv_heads(heads), heads)


def _columns(axis: Axis, config: ModelConfig, ranks: Ranks) -> Extent:
    del config, ranks
    return axis.columns.of_blocks(axis.size, axis.block, axis.name)


def _vocabulary(axis: Axis, config: ModelConfig, ranks: Ranks) -> Extent:
    return axis.of_items(ranks.attention, config.vocab_size)


Cut = Callable[[Axis, ModelConfig, Ranks], Extent]
# By the names of layers in checkpoints
OUTPUTS: Mapping[str, Cut] = {
    "q_proj": _heads,
    "q_b_proj": _heads,
    "kv_b_proj": _heads,
    "k_proj": _kv_heads,
    "v_proj": _kv_heads,
    "gate_proj": _columns,
    "up_proj": _columns,
    "lm_head": _vocabulary,
}
INPUTS: Mapping[str, Cut] = {"o_proj": _heads, "down_proj": _columns}
# Their results are the same for all heads, or join the two inputs of a drafter
WHOLE = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "eh_proj", "fc"})


def divide(
    model: CausalLM, groups: Groups, expert_parts: int = 1, placement: Placement | None = None
) -> None:
    """Leaves to `model` the part of this rank. `expert_parts` divide the routed experts, and the number of ranks is a
    multiple. `placement`: of the experts on these parts, by default in order. Must run before parameters have memory.
    Raises ModelError."""
    config, ranks = model.config, Ranks.of(groups, expert_parts)
    model.config = config_of_rank(config, ranks)
    model.groups = groups
    head = Axis("lm_head", config.vocab_size, ranks.attention, 1)
    model.vocabulary = _vocabulary(head, config, ranks)
    if ranks.dp_size > 1 and not _mixtures(model):
        raise ModelError("--enable-dp-attention: the model has no routed experts")
    model.placement = _divide_layers(
        model, list(model.model.layers), config, groups, ranks, placement
    )


def divide_drafter(
    drafter: MultiTokenPrediction | EagleHead,
    layers: Sequence[nn.Module],
    groups: Groups,
    placement: Placement | None,
) -> None:
    """Leaves to `drafter` the part of this rank, as `divide` does for the model. `layers`: its layers. `placement`: of
    the model's experts; the drafter's are in order, on as many parts, with as many replicas. Raises ModelError."""
    ranks, own = Ranks.of(groups, 1 if placement is None else placement.parts), None
    if placement is not None and _mixtures(drafter):
        redundant = len(placement.layers[0]) - placement.experts
        own = trivial(len(layers), placement.experts, placement.parts, redundant)
    config = drafter.config
    drafter.config = config_of_rank(config, ranks)
    _divide_layers(drafter, layers, config, groups, ranks, own)


def _divide_layers(
    module: nn.Module,
    layers: Sequence[nn.Module],
    config: ModelConfig,
    groups: Groups,
    ranks: Ranks,
    placement: Placement | None,
) -> Placement | None:
    """Divides all of `module`, which has these `layers`. Returns the placement of its experts. Raises ModelError."""
    linears = {name: layer for name, layer in module.named_modules() if isinstance(layer, Linear)}
    placement, stacks = _divide_experts(
        layers, ranks.experts, placement, ranks.exchange_parts if groups.all_to_all else ()
    )
    # All formats count, since a layer's results are the next one's inputs
    block = max(linear.format.granularity for linear in linears.values())
    for name, linear in linears.items():
        _divide_linear(name, linear, block, config, ranks, stacks.get(linear))
    for part in module.modules():
        if isinstance(part, RMSNorm):
            part.group = groups.attention
    return placement


def _divide_experts(
    layers: Sequence[nn.Module],
    share: Share,
    placement: Placement | None,
    exchange_parts: Sequence[int],
) -> tuple[Placement | None, dict[Linear, Members]]:
    """Returns the placement, and the experts of this rank in each stack. Tells the gates where they are, and those of
    `exchange_parts`, if any. Raises ModelError."""
    stacks: dict[Linear, Members] = {}
    stack = next(
        (
            linear.shape.stack
            for layer in layers
            for linear in _linears(layer)
            if linear.shape.stack
        ),
        None,
    )
    if stack is None:
        if share.count > 1:
            raise ModelError(f"--ep-size {share.count}: the model has no routed experts")
        return None, stacks
    placement = placement or trivial(len(layers), stack.full, share.count)
    for index, layer in enumerate(layers):
        for linear in _linears(layer):
            if linear.shape.stack is not None:
                stacks[linear] = placement.members(index, share.index)
        for module in layer.modules():
            if isinstance(module, Gate) and share.count > 1:
                module.table = placement.table(index, share.index)
                if len(exchange_parts) > 1:
                    parts = [placement.table(index, part) >= 0 for part in exchange_parts]
                    module.reaches = torch.stack(parts, dim=-1)
    return placement, stacks


def _mixtures(module: nn.Module) -> list[MixtureOfExperts]:
    return [part for part in module.modules() if isinstance(part, MixtureOfExperts)]


def _linears(model: nn.Module) -> Iterator[Linear]:
    return (module for module in model.modules() if isinstance(module, Linear))


def config_of_rank(config: Config, ranks: Ranks) -> Config:
    """Returns `config` with the numbers of heads that a rank has, for its attention and KV cache. Raises ModelError."""
    heads: dict[str, Any] = {
        "num_heads": ranks.attention.of(config.num_heads, "num_attention_heads").length
    }
    if any(field.name == "num_kv_heads" for field in fields(config)):
        count = _num_kv_heads(config)
        heads["num_kv_heads"] = ranks.kv_heads(count).of(count, "num_key_value_heads").length
    return replace(config, **heads)


def _num_kv_heads(config: ModelConfig) -> int:
    count: int = getattr(config, "num_kv_heads", config.num_heads)
    return count


def _divide_linear(
    name: str,
    linear: Linear,
    block: int,
    config: ModelConfig,
    ranks: Ranks,
    stack: Members | None,
) -> None:
    """`stack`: the experts of this rank, if the layer is a stack of them."""
    whole = linear.shape
    columns = ranks.attention if whole.stack is None else ranks.expert_columns
    layers = checkpoint_layers(name, linear)[: len(whole.rows)]
    kinds = [layer.rpartition(".")[2] for layer in layers]
    unknown = set(kinds) - {*OUTPUTS, *INPUTS, *WHOLE}
    assert not unknown, f"{unknown} in no table"

    def own(cuts: Mapping[str, Cut], part: int, axis: Extent) -> Extent:
        if kinds[part] not in cuts:
            return axis
        granularity = block if cuts[kinds[part]] is _columns else linear.format.granularity
        found = Axis(f"{layers[part]}.weight", axis.full, columns, granularity)
        return cuts[kinds[part]](found, config, ranks)

    linear.divide(
        LinearShape(
            own(INPUTS, 0, whole.columns),
            tuple(own(OUTPUTS, part, rows) for part, rows in enumerate(whole.rows)),
            stack,
        ),
        adds_bias=ranks.attention.index == 0 or kinds[0] not in INPUTS,
    )
