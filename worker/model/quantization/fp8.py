"""Layers whose weights stay FP8 in memory and are dequantized each time they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.fp8_dequantize import fp8_dequantize
from mla_router.worker.model.layers import Linear, empty_parameter
from mla_router.worker.model.quantization.config import Quantization


class Fp8Linear(Linear):
    """Takes the place of `plain`: weight float8_e4m3fn, and the float32 scales of its blocks.

    Each joined part has blocks of its own, as in the checkpoint, so that its last one may be cut off.
    """

    constant = False

    def __init__(self, plain: Linear, quantization: Quantization) -> None:
        super().__init__(
            plain.inputs,
            plain.parts or plain.outputs,
            bias=plain.biased,
            experts=plain.experts,
        )
        self.dtype = plain.weight.dtype
        self.block = quantization.block_size(max(self.part_sizes), self.inputs)
        self.scale_name = quantization.scale_name
        self.weight = empty_parameter(*plain.weight.shape, dtype=torch.float8_e4m3fn)
        blocks = (
            sum(self.rows(self.scale_name, size) for size in self.part_sizes),
            -(-self.inputs // self.block[1]),
        )
        scale = empty_parameter(*plain.weight.shape[:-2], *blocks, dtype=torch.float32)
        self.register_parameter(self.scale_name, scale)

    def dense_weight(self) -> Tensor:
        return self._dequantized(self.weight, self.get_parameter(self.scale_name))

    def dense_expert(self, index: int) -> Tensor:
        """[outputs, inputs]: the weight of one of the stacked layers."""
        return self._dequantized(self.weight[index], self.get_parameter(self.scale_name)[index])

    def _dequantized(self, weight: Tensor, scale: Tensor) -> Tensor:
        return fp8_dequantize(
            weight,
            scale,
            block=self.block,
            parts=self.part_sizes,
            dtype=self.dtype,
        )

    def rows(self, kind: str, outputs: int) -> int:
        return -(-outputs // self.block[0]) if kind == self.scale_name else outputs
