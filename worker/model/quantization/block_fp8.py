"""Weights in float8_e4m3fn with a float32 scale for each block. Each product dequantizes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mla_router.worker.kernels.weight import Weight
from mla_router.worker.model.linear import Linear, LinearShape, WeightFormat, empty_parameter

# Standard deviation of random values. The largest value of the type is 448: nothing is clipped
RANDOM_DEVIATION = 64.0


@dataclass(frozen=True)
class BlockFp8(WeightFormat):
    """The format of DeepSeek-V3's checkpoints, with blocks of 128 x 128. A side of None is the whole side of a matrix:
    other checkpoints have one scale for each row or tensor.

    As in the checkpoint, the blocks of each joined part begin at its first row, and its last block may be cut off.
    """

    scale_name: str  # of the parameter with the scales
    block: tuple[int | None, int | None]  # rows and columns that share a scale

    def create(self, shape: LinearShape) -> dict[str, nn.Parameter]:
        columns = self._block(shape)[1]
        blocks = sum(self.rows(self.scale_name, part) for part in shape.parts)
        scales = shape.stacked(blocks, -(-shape.inputs // columns))
        values = shape.stacked(shape.outputs, shape.inputs)
        return {
            "weight": empty_parameter(*values, dtype=torch.float8_e4m3fn),
            self.scale_name: empty_parameter(*scales, dtype=torch.float32),
        }

    def rows(self, name: str, outputs: int) -> int:
        if name != self.scale_name:
            return outputs
        return 1 if self.block[0] is None else -(-outputs // self.block[0])

    def weight(self, layer: Linear) -> Weight:
        return Weight(
            layer.weight,
            self._scales(layer),
            block=self._block(layer.shape),
            parts=layer.shape.parts,
            constant=True,
        )

    def fill_random(self, layer: Linear, generator: torch.Generator) -> None:
        """Draws one expert at a time: torch draws no FP8, and all experts in float32 would take four times the
        memory."""
        self._scales(layer).fill_(layer.shape.inputs**-0.5 / RANDOM_DEVIATION)
        for matrix in layer.weight if layer.weight.ndim == 3 else [layer.weight]:
            values = torch.empty(matrix.shape, dtype=torch.float32, device=matrix.device)
            matrix.copy_(values.normal_(std=RANDOM_DEVIATION, generator=generator))

    def _scales(self, layer: Linear) -> Tensor:
        scales: Tensor = getattr(layer, self.scale_name)
        return scales

    def _block(self, shape: LinearShape) -> tuple[int, int]:
        return self.block[0] or max(shape.parts), self.block[1] or shape.inputs
