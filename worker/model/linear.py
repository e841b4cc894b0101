"""Linear layers, and the format in which the weight of one is stored.

A layer has a shape. Its `WeightFormat` declares parameters with the names of checkpoints, and returns the `Weight` for
products. Formats other than `PlainFormat` are files in `quantization/`, and are chosen there after the model is put
together. So parameters are declared without memory, on torch's meta device, and `loader.py` allocates it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.quantized_linear import row_form
from mla_router.worker.kernels.weight import Activations, RowForm, Weight
from mla_router.worker.model.shard import Extent, Extents, Members, Numbers, Shard, cut, full_shape


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Returns a parameter without memory, by default of the current default dtype."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A matrix, or several joined ones with the same columns, or a stack of these for the experts `stack`. A rank may
    hold a piece of each axis, and some of the experts."""

    columns: Extent
    rows: tuple[Extent, ...]  # of each joined matrix
    stack: Members | None = None

    @property
    def inputs(self) -> int:
        return self.columns.length

    @property
    def parts(self) -> tuple[int, ...]:
        """The rows of each joined matrix."""
        return tuple(extent.length for extent in self.rows)

    @property
    def experts(self) -> int | None:
        return None if self.stack is None else len(self.stack.indices)

    @property
    def outputs(self) -> int:
        return sum(self.parts)

    def stacked(self, *sizes: int) -> tuple[int, ...]:
        """Returns `sizes`, after the number of experts if there are any."""
        return sizes if self.experts is None else (self.experts, *sizes)


class Place(NamedTuple):
    """Memory for a tensor of a checkpoint, or for the piece of it at `extents`."""

    memory: Tensor
    extents: Extents

    @property
    def inputs(self) -> int:
        """Columns of the whole tensor."""
        return full_shape(*self)[-1]


class WeightFormat(ABC):
    """The format of the weight of a linear layer: plain or quantized."""

    @abstractmethod
    def create(self, shape: LinearShape) -> dict[str, nn.Parameter]:
        """Returns the parameters of a layer by their names in checkpoints. Their rows are outputs, or blocks of
        outputs, of one part after the other."""

    @property
    def granularity(self) -> int:
        """Numbers of an axis that ranks do not divide, as they share scales. 1: none do."""
        return 1

    def extents(self, name: str, rows: Extent, columns: Extent) -> Extents:
        """Returns the extents of the parameter `name` for a part of a layer with these outputs and inputs."""
        del name
        return rows, columns

    def shards(self, places: Mapping[str, Place]) -> dict[str, Shard]:
        """Returns the shards of one part of a layer by the names of their tensors in checkpoints. `places`: of this
        part of each parameter, and of the bias if the part has one."""
        return {name: Numbers(*place) for name, place in places.items()}

    def after_load(self, layer: Linear) -> None:
        """Rearranges loaded parameters, for kernels that read another layout. By default nothing changes."""
        del layer

    @abstractmethod
    def weight(self, layer: Linear) -> Weight:
        """Returns the weight of `layer` for the products of `worker/kernels`, after `after_load`."""

    @abstractmethod
    def fill_random(self, places: Mapping[str, Place], generator: torch.Generator) -> None:
        """Draws the weight of one part of a layer from N(0, 1 / inputs). `places`: see `shards`. A piece is cut from
        the whole weight, so that the numbers do not depend on the ranks."""


class PlainFormat(WeightFormat):
    """Numbers of the model's dtype, such as bfloat16."""

    def create(self, shape: LinearShape) -> dict[str, nn.Parameter]:
        return {"weight": empty_parameter(*shape.stacked(shape.outputs, shape.inputs))}

    def weight(self, layer: Linear) -> Weight:
        return Weight(layer.weight, constant=True)

    def fill_random(self, places: Mapping[str, Place], generator: torch.Generator) -> None:
        memory, extents = weight = places["weight"]
        whole = memory.new_empty(full_shape(memory, extents)) if extents else memory
        whole.normal_(std=weight.inputs**-0.5, generator=generator)
        if extents:
            memory.copy_(cut(whole, extents))


PLAIN = PlainFormat()


class Linear(nn.Module):
    """x @ weight.T + bias, weight [outputs, inputs].

    `outputs` may also name several projections of the same x, whose results are side by side: by their names in
    checkpoints, the number of outputs of each. `bias` may then name the projections that have one, and is 0
    for the others. With `experts` the layer holds the weights of that many layers, [experts, outputs, inputs], for
    `moe_experts` to choose from. `keeps_quantized` is for a weight with products other than this layer's: whether they
    take the quantized weight, with activations of a dtype. Otherwise it is dequantized once, after loading.
    """

    weight: nn.Parameter

    def __init__(
        self,
        inputs: int,
        outputs: int | Mapping[str, int],
        *,
        bias: bool | Collection[str] = False,
        experts: int | None = None,
        keeps_quantized: Callable[[Weight, torch.dtype], bool] | None = None,
    ) -> None:
        super().__init__()
        self.names = () if isinstance(outputs, int) else tuple(outputs)
        parts = (outputs,) if isinstance(outputs, int) else tuple(outputs.values())
        self.biased = bias
        self.keeps_quantized = keeps_quantized
        self.format: WeightFormat = PLAIN
        self.divide(
            LinearShape(
                Extent.whole(inputs),
                tuple(map(Extent.whole, parts)),
                None if experts is None else Members.whole(experts),
            )
        )

    def divide(self, shape: LinearShape, *, adds_bias: bool = True) -> None:
        """Declares the parameters of the piece `shape` of the layer. Of ranks whose results are added one `adds_bias`;
        the bias of the others is zero."""
        self.shape, self.adds_bias = shape, adds_bias
        self.set_format(self.format)
        self.bias = empty_parameter(*shape.stacked(shape.outputs)) if self.biased else None

    def set_format(self, weight_format: WeightFormat) -> None:
        """Declares the parameters of `weight_format` and removes those of the format before, and its buffers."""
        parameters = [name for name, _ in self.named_parameters(recurse=False) if name != "bias"]
        for name in [*parameters, *(name for name, _ in self.named_buffers(recurse=False))]:
            delattr(self, name)
        self.format = weight_format
        for name, parameter in weight_format.create(self.shape).items():
            self.register_parameter(name, parameter)

    def after_load(self, dtype: torch.dtype) -> None:
        """Prepares loaded parameters for products with activations of `dtype`."""
        self.format.after_load(self)
        keeps, weight = self.keeps_quantized, self.operand
        if keeps is not None and not weight.is_plain and not keeps(weight, dtype):
            values = weight.dense(dtype).values
            self.set_format(PLAIN)
            self.weight = nn.Parameter(values, requires_grad=False)

    @property
    def operand(self) -> Weight:
        """The weight for the products of `worker/kernels`."""
        return self.format.weight(self)

    def forward(self, x: Activations) -> Tensor:
        return linear(x, self.format.weight(self), self.bias)

    def row_form(self, x: Tensor) -> RowForm:
        """Returns the form in which `forward` takes as many rows as x [T, ...] has, of its dtype."""
        return row_form(x, self.format.weight(self))

    def has_bias(self, name: str) -> bool:
        """Whether the projection `name` has one in the checkpoint."""
        return self.biased if isinstance(self.biased, bool) else name in self.biased

    def extents(self, name: str, part: int) -> Extents:
        """Returns the extents of the parameter `name` for a part of the layer."""
        rows, columns = self.shape.rows[part], self.shape.columns
        return (rows,) if name == "bias" else self.format.extents(name, rows, columns)
