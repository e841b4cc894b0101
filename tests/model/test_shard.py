"""Tensors of a checkpoint that a shard takes, and the mistake that it names for others."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mla_router.worker.model.shard import ActivationScale, Extent, Mistake, Numbers, Scales

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


ROWS, COLUMNS = Extent(2, 3, 6), Extent(1, 2, 4)


def test_a_piece_is_cut_from_the_whole_tensor() -> None:
    whole = torch.arange(24.0).view(6, 4)
    memory = torch.zeros(3, 2)
    assert Numbers(memory, (ROWS, COLUMNS)).fill(whole) is None
    assert memory.tolist() == [[9, 10], [13, 14], [17, 18]]
    assert Numbers(memory, (ROWS, COLUMNS)).bytes_read(whole) == memory.nbytes
    assert Numbers(memory, (ROWS, COLUMNS)).fill(memory) == Mistake("misshaped", "not [6, 4]")


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_scales_of_some_rows(shape: tuple[int, ...]) -> None:
    memory = torch.zeros(3, 1)
    shard = Scales(memory, (ROWS, Extent.whole(1)))
    assert shard.fill(torch.arange(1.0, 7.0).view(shape)) is None
    assert memory.tolist() == [[3], [4], [5]]
    assert shard.fill(torch.ones(3, 1)) == Mistake("misshaped", "not [6, 1]")


def test_only_the_pages_of_a_piece_are_read(tmp_path: Path) -> None:
    size = 1 << 25
    save_file({"weight": torch.ones(64, size // 256)}, tmp_path / "file.safetensors")

    def mapped() -> int:
        status = Path("/proc/self/status").read_text()
        found = re.search(r"^RssFile:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    with safe_open(tmp_path / "file.safetensors", framework="pt") as tensors:
        before = mapped()
        extents = Extent(16, 16, 64), Extent.whole(size // 256)
        memory = torch.zeros(16, size // 256)
        assert Numbers(memory, extents).fill(tensors.get_tensor("weight")) is None
        assert size // 4 <= mapped() - before < size // 3
    assert memory.all()
