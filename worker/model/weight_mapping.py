"""Weight mapping: the names of a model's tensors in checkpoints, and the memory that each tensor is loaded to."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from mla_router.worker.model.linear import Linear


def weight_mapping(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the name in the checkpoint and the memory of every tensor that `model` needs: a parameter, or the
    shard of one where projections are joined or experts stacked."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield from _shards(name, module)
        else:
            for kind, parameter in module.named_parameters(recurse=False):
                yield f"{name}.{kind}", parameter


def checkpoint_layers(name: str, linear: Linear) -> list[str]:
    """Returns the names in the checkpoint of the layers that are joined in `linear`, which the model calls `name`:
    the parts of one expert after the parts of the one before."""
    owner, _, own = name.rpartition(".")
    experts = linear.shape.experts
    owners = [owner] if experts is None else [f"{owner}.{i}" for i in range(experts)]
    return [
        f"{owner}.{part}" if owner else part for owner in owners for part in linear.names or [own]
    ]


def _shards(name: str, linear: Linear) -> Iterator[tuple[str, Tensor]]:
    layers = checkpoint_layers(name, linear)
    for kind, parameter in linear.named_parameters(recurse=False):
        rows = [linear.rows(kind, outputs) for outputs in linear.shape.parts]
        stacked = [parameter] if linear.shape.experts is None else list(parameter)
        shards = [shard for expert in stacked for shard in expert.split(rows)]
        for layer, shard in zip(layers, shards, strict=True):
            if kind != "bias" or linear.has_bias(layer.rpartition(".")[2]):
                yield f"{layer}.{kind}", shard
