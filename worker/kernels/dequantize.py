"""Dequantization of values of one byte with one scale for each block.

Blocks are 128 x 128 in DeepSeek's checkpoints (DeepSeek-V3, arXiv:2412.19437, section 3.3.2), whole rows with
per-channel scales, and the whole matrix with a per-tensor scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dequantize_blocks(
    values: Tensor,
    scales: Tensor,
    *,
    block: tuple[int, int],
    parts: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Returns each value times the scale of its block, [..., N, K] in `dtype`, multiplied in float32.

    values [..., N, K] float8_e4m3fn or int8; scales [..., S, ceil(K / block[1])] float32. The N rows are one or
    several matrices of `parts` rows, one below the other. The blocks of a matrix begin at its first row, and its last
    blocks may be cut off: S is the sum of ceil(part / block[0]).

    Does not wait for the device. Allocates one float32 copy beside the result.
    """
    rows, columns = values.shape[-2:]
    heights = [-(-part // block[0]) for part in parts]
    expected = (*values.shape[:-2], sum(heights), -(-columns // block[1]))
    assert scales.shape == expected and sum(parts) == rows, (
        f"values {tuple(values.shape)}, scales {tuple(scales.shape)} instead of {expected}, "
        f"blocks {block}, parts {tuple(parts)}"
    )
    row_scale = torch.cat(
        [
            blocks.unsqueeze(-2)
            .expand(*blocks.shape[:-1], block[0], -1)
            .flatten(-3, -2)[..., :part, :]
            for part, blocks in zip(parts, torch.split(scales, heights, dim=-2), strict=True)
        ],
        dim=-2,
    )  # [..., N, ceil(K / block[1])]
    out = values.float()
    whole = columns // block[1]
    full, rest = torch.split(out, [whole * block[1], columns - whole * block[1]], dim=-1)
    by_block = full.view(*full.shape[:-1], whole, block[1])
    by_block.mul_(row_scale[..., :whole, None])
    rest.mul_(row_scale[..., whole:])
    return out.to(dtype)
