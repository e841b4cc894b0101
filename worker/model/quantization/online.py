"""Online quantization: the weights of a plain checkpoint are quantized while they load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.quantize import LARGEST
from mla_router.worker.model.linear import Place
from mla_router.worker.model.quantization.block_scaled import BlockScaled
from mla_router.worker.model.shard import (
    Extents,
    Mistake,
    Numbers,
    Shard,
    cut,
    dtype_name,
    full_shape,
    is_wide,
)

SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of blocks of zeros


@dataclass(frozen=True)
class OnlineBlockScaled(BlockScaled):
    """Each tensor of the checkpoint is quantized on the model's device when it is read. Memory holds a plain copy of
    the tensors that are being read, never of all."""

    def shards(self, places: Mapping[str, Place]) -> dict[str, Shard]:
        values, extents = places["weight"]
        block = self.block[0] or values.shape[0], self.block[1] or values.shape[1]
        scales = places[self.scale_name].memory
        shards: dict[str, Shard] = {"weight": Quantizing(values, scales, block, extents)}
        if "bias" in places:
            shards["bias"] = Numbers(*places["bias"])
        return shards


class Quantizing(Shard):
    """The values [N, K] and the scales of a weight that is plain in the checkpoint, or of the piece of it at
    `extents`."""

    def __init__(
        self, values: Tensor, scales: Tensor, block: tuple[int, int], extents: Extents = ()
    ) -> None:
        self.values, self.scales, self.block, self.extents = values, scales, block, extents

    def fill(self, tensor: Tensor) -> Mistake | None:
        full = full_shape(self.values, self.extents)
        if tensor.shape != full:
            return Mistake("misshaped", f"not {list(full)}")
        if not is_wide(tensor):
            return Mistake("mistyped", f"{dtype_name(tensor)}, not plain")
        weight = cut(tensor, self.extents).to(self.values.device)
        values, scales = quantize_blocks(weight, self.block, self.values.dtype)
        if not scales.isfinite().all():
            return Mistake("invalid", "a weight is NaN or infinite")
        self.values.copy_(values)
        self.scales.copy_(scales)
        return None


def quantize_blocks(
    weight: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the values [N, K] in `dtype`, float8_e4m3fn or int8, of a plain weight [N, K], and the scales that they are
    to be multiplied by, [ceil(N / block[0]), ceil(K / block[1])] float32.

    The largest magnitude of a block becomes the largest value of the type. Values are rounded to nearest, ties to
    even. The scale of a block with NaN or an infinite number is NaN or infinite.
    """
    rows, columns = weight.shape
    height, width = -(-rows // block[0]), -(-columns // block[1])
    short = (0, width * block[1] - columns, 0, height * block[0] - rows)
    blocks = functional.pad(weight.float(), short).view(height, block[0], width, block[1])
    largest = LARGEST[dtype]
    scales = (blocks.abs().amax(dim=(1, 3)) / largest).clamp_min(SMALLEST_SCALE)
    # A scale is rounded: the quotient may exceed the range by its last bit
    scaled = (blocks / scales[:, None, :, None]).clamp_(-largest, largest)
    if not dtype.is_floating_point:
        scaled.round_()
    values = scaled.view(height * block[0], width * block[1])[:rows, :columns]
    return values.to(dtype).contiguous(), scales
