"""Tensors of a checkpoint that a shard takes, and the mistake that it names for others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mla_router.worker.model.shard import ActivationScale, Mistake, Numbers, Scales

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_wide_numbers_are_converted(dtype: torch.dtype) -> None:
    memory = torch.zeros(2, 3)
    assert Numbers(memory).fill(torch.full((2, 3), 1.5, dtype=dtype)) is None
    assert memory.tolist() == [[1.5] * 3] * 2


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        (torch.float32, FP8),
        (torch.bfloat16, torch.int8),
        (torch.float32, torch.int32),
        (FP8, torch.bfloat16),
        (FP8, torch.int8),
        (FP8, torch.float8_e5m2),
        (torch.int8, FP8),
        (torch.int8, torch.uint8),
        (torch.int8, torch.float32),
    ],
)
def test_other_types_are_refused(memory: torch.dtype, found: torch.dtype) -> None:
    values = torch.zeros(2, 3).to(memory)
    mistake = Numbers(values).fill(torch.ones(2, 3).to(found))
    assert mistake is not None and mistake.kind == "mistyped"
    names = [str(dtype).removeprefix("torch.") for dtype in (found, memory)]
    assert mistake.reason == f"{names[0]}, not {names[1]}"
    assert not values.float().any()


@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (6,), (2, 3, 1)])
def test_numbers_of_another_shape(shape: Sequence[int]) -> None:
    assert Numbers(torch.zeros(2, 3)).fill(torch.ones(tuple(shape))) == Mistake(
        "misshaped", "not [2, 3]"
    )


@pytest.mark.parametrize(
    ("memory", "shapes"),
    [
        ((1, 1), [(), (1,), (1, 1)]),  # of a tensor
        ((4, 1), [(4,), (4, 1)]),  # of each row
        ((4, 3), [(4, 3)]),  # of each block
        ((1, 3), [(1, 3)]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_of_scales(
    memory: tuple[int, int], shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    numbers = torch.arange(math.prod(memory), dtype=torch.float32) + 1
    every = {(), (1,), (1, 1), (4,), (4, 1), (1, 4), (4, 3), (12,), (3,), (1, 3), (3, 4), (2, 6)}
    for shape in every:
        kept = torch.zeros(*memory)
        if shape in shapes:
            assert Scales(kept).fill(numbers.to(dtype).view(shape)) is None
            assert torch.equal(kept, numbers.view(memory))
        else:
            mistake = Scales(kept).fill(torch.ones(shape, dtype=dtype))
            assert mistake == Mistake("misshaped", f"not {list(memory)}"), shape
            assert not kept.any()


@pytest.mark.parametrize("number", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_that_mean_nothing(number: float, dtype: torch.dtype) -> None:
    scales = torch.ones(3, 1, dtype=dtype)
    scales[1] = number
    memory = torch.zeros(3, 1)
    mistake = Scales(memory).fill(scales)
    assert mistake == Mistake("invalid", f"a scale is {number}, not positive and finite")
    assert not memory.any()
    mistake = ActivationScale().fill(torch.tensor(number, dtype=dtype))
    assert mistake == Mistake("invalid", f"a scale is {number}, not positive and finite")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e8m0fnu, FP8])
def test_scales_of_other_types(dtype: torch.dtype) -> None:
    mistake = Scales(torch.zeros(3, 1)).fill(torch.ones(3, 1).to(dtype))
    name = str(dtype).removeprefix("torch.")
    assert mistake == Mistake("mistyped", f"{name}, not float32")


@pytest.mark.parametrize(
    ("scale", "fits"),
    [
        (torch.tensor(0.5), True),
        (torch.ones(1), True),
        (torch.ones(1, 1, dtype=torch.bfloat16), True),
        (torch.ones(2), False),
        (torch.ones(0), False),
    ],
)
def test_scales_of_activations(scale: Tensor, fits: bool) -> None:
    shard = ActivationScale()
    assert not shard.is_needed
    assert shard.fill(scale) == (None if fits else Mistake("misshaped", "not [1, 1]"))
