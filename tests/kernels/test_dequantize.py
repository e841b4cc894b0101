"""dequantize_blocks against float64, value by value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.dequantize import dequantize_blocks


def reference(weight: Tensor, scale: Tensor, block: tuple[int, int], parts: list[int]) -> Tensor:
    """Returns [N, K] float64: each value times the scale that it looks up."""
    out = weight.to(torch.float64)
    row = first_block = 0
    for part in parts:
        for i in range(part):
            for j in range(weight.shape[1]):
                out[row + i, j] *= float(scale[first_block + i // block[0], j // block[1]])
        row += part
        first_block += -(-part // block[0])
    return out


@pytest.mark.parametrize(
    ("parts", "columns", "block"),
    [
        ([32], 48, (16, 16)),
        ([37], 50, (16, 16)),  # cut off below and to the right
        ([20, 20], 40, (16, 32)),  # two parts, each with a block that is cut off
        ([5, 19, 8], 7, (8, 8)),  # less than one block
        ([24, 9], 40, (1, 40)),  # a scale a row
        ([24, 9], 40, (24, 40)),  # a scale a part
    ],
)
@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_float64(
    parts: list[int],
    columns: int,
    block: tuple[int, int],
    experts: int | None,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    stack = () if experts is None else (experts,)
    weight = (torch.randn(*stack, sum(parts), columns) * 100).to(torch.float8_e4m3fn)
    heights = sum(-(-part // block[0]) for part in parts)
    scale = torch.rand(*stack, heights, -(-columns // block[1])) + 0.5
    kept = weight.view(torch.uint8).clone(), scale.clone()

    got = dequantize_blocks(weight, scale, block=block, parts=parts, dtype=dtype)

    pairs = zip(weight.view(-1, *weight.shape[-2:]), scale.view(-1, *scale.shape[-2:]), strict=True)
    expected = torch.stack([reference(w, s, block, parts) for w, s in pairs]).view(weight.shape)
    assert got.dtype == dtype
    # One rounding to float32 and one to the result's dtype
    torch.testing.assert_close(
        got.double(), expected, rtol=torch.finfo(dtype).eps / 2 + 1e-7, atol=0
    )
    assert torch.equal(weight.view(torch.uint8), kept[0]) and torch.equal(scale, kept[1])


def test_scales_of_another_shape_are_refused() -> None:
    weight = torch.zeros(32, 48, dtype=torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match=r"scales \(2, 2\) instead of \(2, 3\)"):
        dequantize_blocks(weight, torch.ones(2, 2), block=(16, 16), parts=[32], dtype=torch.float32)
