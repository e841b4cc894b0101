"""Weights of one byte, float8_e4m3fn or int8, with a float32 scale for each block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mla_router.worker.kernels.dequantize import repeat_rows
from mla_router.worker.kernels.quantize import LARGEST
from mla_router.worker.kernels.quantized_linear import for_library
from mla_router.worker.kernels.weight import Weight
from mla_router.worker.model.linear import (
    Linear,
    LinearShape,
    Place,
    WeightFormat,
    empty_parameter,
)
from mla_router.worker.model.shard import (
    ActivationScale,
    Extent,
    Extents,
    Scales,
    Shard,
    cut,
    full_shape,
)

# Standard deviations of random values up to the largest value of the type: next to nothing is clipped
RANDOM_DEVIATIONS = 7
LIBRARY_SCALES = "library_scales"  # the buffer with `Weight.library_scales`


@dataclass(frozen=True)
class BlockScaled(WeightFormat):
    """Blocks have 128 x 128 values in DeepSeek-V3's checkpoints. A side of None is the whole side of a matrix: other
    checkpoints have one scale for each row or tensor.

    In checkpoints the blocks of each part begin at its first row, and its last block may be cut off. Kernels find the
    scale of row n of joined parts at n // height. If a part begins within a block of the rows above, `after_load` cuts
    blocks into lower ones of equal height, and repeats their scales.
    """

    dtype: torch.dtype  # of the values
    scale_name: str  # of the parameter with the scales
    block: tuple[int | None, int | None]  # rows and columns that share a scale
    weight_only: bool = False  # activations are not quantized

    def create(self, shape: LinearShape) -> dict[str, nn.Parameter]:
        extents = [self.extents(self.scale_name, rows, shape.columns) for rows in shape.rows]
        scales = shape.stacked(sum(rows.length for rows, _ in extents), extents[0][1].length)
        values = shape.stacked(shape.outputs, shape.inputs)
        return {
            "weight": empty_parameter(*values, dtype=self.dtype),
            self.scale_name: empty_parameter(*scales, dtype=torch.float32),
        }

    @property
    def granularity(self) -> int:
        return math.lcm(*(side or 1 for side in self.block))

    def extents(self, name: str, rows: Extent, columns: Extent) -> Extents:
        if name != self.scale_name:
            return rows, columns
        return rows.blocks(self.block[0]), columns.blocks(self.block[1])

    def shards(self, places: Mapping[str, Place]) -> dict[str, Shard]:
        return super().shards(places) | {
            self.scale_name: Scales(*places[self.scale_name]),
            "input_scale": ActivationScale(),
        }

    def after_load(self, layer: Linear) -> None:
        height = self._height(layer.shape)
        if height != self.block[0]:
            aligned = nn.Parameter(self._lowered(layer, height), requires_grad=False)
            layer.register_parameter(self.scale_name, aligned)
        library_scales = for_library(self.weight(layer)).library_scales
        if library_scales is not None:
            layer.register_buffer(LIBRARY_SCALES, library_scales.detach(), persistent=False)

    def _lowered(self, layer: Linear, height: int) -> Tensor:
        """Returns the scales of blocks of `height` rows, which divides the rows of all blocks and parts but the last."""
        parts = layer.shape.parts
        blocks = [rows.blocks(self.block[0]).length for rows in layer.shape.rows]
        scales = [
            repeat_rows(of_part, (self.block[0] or part) // height)[..., : -(-part // height), :]
            for part, of_part in zip(
                parts, torch.split(self._scales(layer), blocks, dim=-2), strict=True
            )
        ]
        return torch.cat(scales, dim=-2)

    def weight(self, layer: Linear) -> Weight:
        shape = layer.shape
        block = self._height(shape), self._width(shape)
        return Weight(
            layer.weight,
            self._scales(layer),
            block,
            constant=True,
            weight_only=self.weight_only,
            library_scales=getattr(layer, LIBRARY_SCALES, None),
        )

    def fill_random(self, places: Mapping[str, Place], generator: torch.Generator) -> None:
        largest = LARGEST[self.dtype]
        deviation = largest / RANDOM_DEVIATIONS
        memory, extents = weight = places["weight"]
        places[self.scale_name].memory.fill_(weight.inputs**-0.5 / deviation)
        values = torch.empty(full_shape(memory, extents), dtype=torch.float32, device=memory.device)
        values.normal_(std=deviation, generator=generator).round_()
        memory.copy_(cut(values.clamp_(-largest, largest), extents))

    def _scales(self, layer: Linear) -> Tensor:
        scales: Tensor = getattr(layer, self.scale_name)
        return scales

    def _height(self, shape: LinearShape) -> int:
        """Returns the rows that share a scale after `after_load`: the most that divide the height of the blocks and the
        first row of each part. A scale of a whole tensor becomes one a row."""
        return math.gcd(self.block[0], *shape.parts[:-1]) if self.block[0] else 1

    def _width(self, shape: LinearShape) -> int:
        return self.block[1] or shape.inputs
