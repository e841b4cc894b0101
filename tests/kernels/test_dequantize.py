"""dequantize_blocks against float64, value by value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.dequantize import dequantize_blocks


def reference(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns [N, K] float64: each value times the scale that it looks up."""
    out = weight.to(torch.float64)
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            out[i, j] *= float(scale[i // block[0], j // block[1]])
    return out


@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [
        (32, 48, (16, 16)),
        (37, 50, (16, 16)),  # cut off below and to the right
        (5, 7, (8, 8)),  # less than one block
        (33, 40, (1, 40)),  # a scale a row
        (33, 40, (1, 16)),
        (33, 40, (33, 40)),  # one scale
    ],
)
@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_float64(
    rows: int,
    columns: int,
    block: tuple[int, int],
    experts: int | None,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    stack = () if experts is None else (experts,)
    weight = (torch.randn(*stack, rows, columns) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(*stack, -(-rows // block[0]), -(-columns // block[1])) + 0.5
    kept = weight.view(torch.uint8).clone(), scale.clone()

    got = dequantize_blocks(weight, scale, block=block, dtype=dtype)

    pairs = zip(weight.view(-1, *weight.shape[-2:]), scale.view(-1, *scale.shape[-2:]), strict=True)
    expected = torch.stack([reference(w, s, block) for w, s in pairs]).view(weight.shape)
    assert got.dtype == dtype
    # One rounding to float32 and one to the result's dtype
    torch.testing.assert_close(
        got.double(), expected, rtol=torch.finfo(dtype).eps / 2 + 1e-7, atol=0
    )
    assert torch.equal(weight.view(torch.uint8), kept[0]) and torch.equal(scale, kept[1])


def test_scales_of_another_shape_are_refused() -> None:
    weight = torch.zeros(32, 48, dtype=torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match=r"scales \(2, 2\) instead of \(2, 3\)"):
        dequantize_blocks(weight, torch.ones(2, 2), block=(16, 16), dtype=torch.float32)
