"""What checkpoints call the parameters of a model, and where in memory each of their tensors goes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from mla_router.worker.model.layers import Linear


def destinations(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The name in the checkpoint and the memory of every tensor that `model` needs: parameters, or
    their slices where projections are joined or experts stacked."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield from _of_linear(name, module)
        else:
            for kind, parameter in module.named_parameters(recurse=False):
                yield f"{name}.{kind}", parameter


def checkpoint_layers(name: str, linear: Linear) -> list[str]:
    """What a checkpoint calls the layers that `linear`, which the model calls `name`, consists of, one
    expert's parts after the other's."""
    owner, _, own = name.rpartition(".")
    owners = [owner] if linear.experts is None else [f"{owner}.{i}" for i in range(linear.experts)]
    return [
        f"{owner}.{part}" if owner else part for owner in owners for part in linear.parts or [own]
    ]


def _of_linear(name: str, linear: Linear) -> Iterator[tuple[str, Tensor]]:
    layers = checkpoint_layers(name, linear)
    for kind, parameter in linear.named_parameters(recurse=False):
        rows = [linear.rows(kind, size) for size in linear.part_sizes]
        stacked = [parameter] if linear.experts is None else list(parameter)
        tensors = [part for weight in stacked for part in weight.split(rows)]
        for layer, tensor in zip(layers, tensors, strict=True):
            if kind != "bias" or linear.has_bias(layer.rpartition(".")[2]):
                yield f"{layer}.{kind}", tensor
