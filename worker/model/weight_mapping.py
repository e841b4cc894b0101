"""Weight mapping: the names of a model's tensors in checkpoints, and the shard that each tensor is loaded to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import nn

from mla_router.worker.model.decoder import AttentionLayer
from mla_router.worker.model.layers import RMSNorm
from mla_router.worker.model.linear import Linear, Place
from mla_router.worker.model.shard import Members, Numbers, OfAnotherRank, Shard


def weight_mapping(model: nn.Module) -> Iterator[tuple[str, Shard]]:
    """Yields the name in the checkpoint and the shard of every tensor of `model`: a parameter, a part of one where
    projections are joined or experts stacked, or a scale of a KV cache."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield from _shards(name, module)
        elif isinstance(module, RMSNorm):
            yield f"{name}.weight", module.shard()
        else:
            for kind, parameter in module.named_parameters(recurse=False):
                yield f"{name}.{kind}", Numbers(parameter)
        if isinstance(module, AttentionLayer):
            for kind, shard in module.kv_scale_shards.items():
                yield f"{name}.{kind}", shard


def checkpoint_layers(name: str, linear: Linear, stack: Members | None = None) -> list[str]:
    """Returns the names in the checkpoint of the layers that are joined in `linear`, which the model calls `name`:
    the parts of one expert after the parts of the one before. `stack`: experts, by default those of the rank."""
    owner, _, own = name.rpartition(".")
    stack = stack or linear.shape.stack
    owners = [owner] if stack is None else [f"{owner}.{i}" for i in stack.indices]
    return [
        f"{owner}.{part}" if owner else part for owner in owners for part in linear.names or [own]
    ]


def places(name: str, linear: Linear) -> dict[str, dict[str, Place]]:
    """Returns the places in `linear` of the tensors of each of its `checkpoint_layers`, by the names of parameters."""
    layers = checkpoint_layers(name, linear)
    found = {layer: dict[str, Place]() for layer in layers}
    for kind, parameter in linear.named_parameters(recurse=False):
        parts = [linear.extents(kind, part) for part in range(len(linear.shape.rows))]
        rows = [extents[0].length for extents in parts]
        stacked = [parameter] if linear.shape.experts is None else list(parameter)
        views = [view for expert in stacked for view in torch.split(expert, rows)]
        for layer, view, extents in zip(layers, views, parts * len(stacked), strict=True):
            if kind != "bias" or linear.has_bias(layer.rpartition(".")[2]):
                is_whole = all(extent.is_whole for extent in extents)
                found[layer][kind] = Place(view, () if is_whole else extents)
    return found


def _shards(name: str, linear: Linear) -> Iterator[tuple[str, Shard]]:
    of_rank = {
        layer: linear.format.shards(of_layer) for layer, of_layer in places(name, linear).items()
    }
    for layer, shards in of_rank.items():
        for kind, shard in shards.items():
            is_elsewhere = kind == "bias" and not linear.adds_bias
            yield f"{layer}.{kind}", OfAnotherRank() if is_elsewhere else shard
    stack = linear.shape.stack
    if stack is None:
        return
    # The experts of other ranks have the tensors of this rank's first one
    first = list(of_rank.values())[: len(linear.shape.rows)]
    layers = checkpoint_layers(name, linear, Members.whole(stack.full))
    for layer, shards in zip(layers, cycle(first), strict=False):
        if layer not in of_rank:
            for kind, shard in shards.items():
                yield f"{layer}.{kind}", OfAnotherRank(is_needed=shard.is_needed)
