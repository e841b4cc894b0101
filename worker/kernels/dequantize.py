"""Dequantization of values of one byte with one scale for each block.

Blocks are 128 x 128 in DeepSeek's checkpoints (DeepSeek-V3, arXiv:2412.19437, section 3.3.2), whole rows with
per-channel scales, and the whole matrix with a per-tensor scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.widen import to_float32


def dequantize_blocks(
    values: Tensor, scales: Tensor, *, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Returns each value times the scale of its block, [..., N, K] in `dtype`, multiplied in float32.

    values [..., N, K] float8_e4m3fn or int8; scales [..., ceil(N / block[0]), ceil(K / block[1])] float32. The last
    blocks may be cut off.

    Does not wait for the device. Allocates one float32 copy beside the result.
    """
    rows, columns = values.shape[-2:]
    expected = (*values.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    assert scales.shape == expected, (
        f"values {tuple(values.shape)}, scales {tuple(scales.shape)} instead of {expected}, blocks {block}"
    )
    row_scale = repeat_rows(scales, block[0])[..., :rows, :]  # [..., N, ceil(K / block[1])]
    out = to_float32(values)
    whole = columns // block[1]
    full, rest = torch.split(out, [whole * block[1], columns - whole * block[1]], dim=-1)
    by_block = full.view(*full.shape[:-1], whole, block[1])
    by_block.mul_(row_scale[..., :whole, None])
    rest.mul_(row_scale[..., whole:])
    return out.to(dtype)


def repeat_rows(rows: Tensor, times: int) -> Tensor:
    """Returns each of `rows` [..., S, C] `times` times, [..., S * times, C]."""
    return rows.unsqueeze(-2).expand(*rows.shape[:-1], times, -1).flatten(-3, -2)
