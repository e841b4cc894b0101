"""Weight mapping: the names of a model's tensors in checkpoints, and the shard that each tensor is loaded to."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mla_router.worker.model.decoder import AttentionLayer
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.shard import Numbers, Scales, Shard


def weight_mapping(model: nn.Module) -> Iterator[tuple[str, Shard]]:
    """Yields the name in the checkpoint and the shard of every tensor of `model`: a parameter, or a part of one where
    projections are joined or experts stacked."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield from _shards(name, module)
        else:
            # The own parameters of attention are the scales of its KV cache
            shard = Scales if isinstance(module, AttentionLayer) else Numbers
            for kind, parameter in module.named_parameters(recurse=False):
                yield f"{name}.{kind}", shard(parameter)


def checkpoint_layers(name: str, linear: Linear) -> list[str]:
    """Returns the names in the checkpoint of the layers that are joined in `linear`, which the model calls `name`:
    the parts of one expert after the parts of the one before."""
    owner, _, own = name.rpartition(".")
    experts = linear.shape.experts
    owners = [owner] if experts is None else [f"{owner}.{i}" for i in range(experts)]
    return [
        f"{owner}.{part}" if owner else part for owner in owners for part in linear.names or [own]
    ]


def _shards(name: str, linear: Linear) -> Iterator[tuple[str, Shard]]:
    memory = {layer: dict[str, Tensor]() for layer in checkpoint_layers(name, linear)}
    for kind, parameter in linear.named_parameters(recurse=False):
        rows = [linear.rows(kind, outputs) for outputs in linear.shape.parts]
        stacked = [parameter] if linear.shape.experts is None else list(parameter)
        views = [view for expert in stacked for view in torch.split(expert, rows)]
        for layer, view in zip(memory, views, strict=True):
            if kind != "bias" or linear.has_bias(layer.rpartition(".")[2]):
                memory[layer][kind] = view
    for layer, views_of_layer in memory.items():
        for kind, shard in linear.format.shards(views_of_layer).items():
            yield f"{layer}.{kind}", shard
