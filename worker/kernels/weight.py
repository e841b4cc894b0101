"""Operands of matrix products: weights and activations, as plain numbers or quantized with scales.

Every product takes a `Weight`, and so do the ops that join a product with another op. Layers and models do not
distinguish plain and quantized weights. Rows of activations leave the op that computes them in the `RowForm` of the
products that take them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mla_router.worker.kernels.dequantize import dequantize_blocks


class Weight(NamedTuple):
    """A matrix [N, K] for x @ weight.T, or a stack of E matrices [E, N, K].

    Without `scales`, `values` are numbers of the activations' dtype. With `scales` they are quantized: the value at row
    n and column k has the scale at row n // block[0] and column k // block[1]. `dequantize`, which has the parameters of
    `dequantize_blocks`, returns the numbers.
    """

    values: Tensor  # [..., N, K]
    scales: Tensor | None = None  # [..., ceil(N / block[0]), ceil(K / block[1])] float32
    block: tuple[int, int] = (1, 1)  # rows and columns that share a scale
    constant: bool = False  # no kernel writes the values while a model runs (`pdl.py`)
    weight_only: bool = False  # products take activations as they are, for any number of rows
    dequantize: Callable[..., Tensor] = dequantize_blocks
    library_scales: Tensor | None = None  # `scales` as cuBLAS reads them (`quantized_linear.py`)

    @property
    def is_plain(self) -> bool:
        return self.scales is None

    def dense(self, dtype: torch.dtype) -> Weight:
        """Returns the plain weight: itself, or a copy in `dtype`. The copy is the result of a kernel."""
        if self.scales is None:
            return self
        return Weight(self.dequantize(self.values, self.scales, block=self.block, dtype=dtype))

    def expert(self, index: int) -> Weight:
        """Returns one matrix of a stack."""
        scales = None if self.scales is None else self.scales[index]
        return self._replace(values=self.values[index], scales=scales)

    def splits(self, rows: Sequence[int]) -> bool:
        """Whether no block of scales lies across two of the parts of `split_heads`."""
        return self.is_plain or all(count % self.block[0] == 0 for count in rows)

    def split_heads(self, rows: Sequence[int]) -> list[Weight]:
        """Returns views [H, n, K] for each n in `rows`, the rows of each head."""
        assert self.splits(rows), f"a block of {self.block[0]} rows lies across parts of {rows}"
        values = torch.split(torch.unflatten(self.values, 0, (-1, sum(rows))), list(rows), dim=1)
        if self.scales is None:
            return [self._replace(values=part) for part in values]
        heights = [count // self.block[0] for count in rows]
        scales = torch.split(torch.unflatten(self.scales, 0, (-1, sum(heights))), heights, dim=1)
        return [
            self._replace(values=part, scales=of_part, library_scales=None)
            for part, of_part in zip(values, scales, strict=True)
        ]


class Quantized(NamedTuple):
    """Quantized rows of activations [T, K]: values times the scale of their group of columns."""

    values: Tensor  # [T, K] of one byte
    scales: Tensor  # [T, ceil(K / group)] float32
    group: int  # columns that share a scale
    dtype: torch.dtype  # of the rows before, and of a product's result
    plain: Tensor | None = None  # the rows before, for other products

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    def dense(self) -> Tensor:
        """Returns the rows [T, K] in `dtype`."""
        if self.plain is not None:
            return self.plain
        return dequantize_blocks(self.values, self.scales, block=(1, self.group), dtype=self.dtype)


Activations = Tensor | Quantized  # of activations, [T, K]


def dense_rows(x: Activations) -> Tensor:
    """Returns the rows as plain numbers, for a product that has no kernel for quantized ones."""
    return x.dense() if isinstance(x, Quantized) else x


class RowForm(NamedTuple):
    """The form in which products take rows of activations: plain, quantized, or both for several products."""

    plain: bool = True
    quantized: torch.dtype | None = None  # of the values, in groups of `quantize.GROUP` columns

    def __or__(self, other: RowForm) -> RowForm:
        """Returns the form for the products of both. If they differ in the dtype, the second quantizes plain rows."""
        both = self.quantized is not None and other.quantized is not None
        differ = both and self.quantized != other.quantized
        return RowForm(self.plain or other.plain or differ, self.quantized or other.quantized)


PLAIN_ROWS = RowForm()
