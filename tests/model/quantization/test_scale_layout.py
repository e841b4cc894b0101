"""Scales after loading: the scale of row n of a joined layer is at n // height, whatever the parts are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.model.linear import Linear
from mla_router.worker.model.loader import allocate
from mla_router.worker.model.quantization.block_scaled import BlockScaled
from mla_router.worker.model.shard import Numbers, Scales
from mla_router.worker.model.weight_mapping import weight_mapping

Block = tuple[int | None, int | None]


def filled(parts: tuple[int, ...], block: Block, experts: int | None) -> tuple[Linear, Tensor]:
    """Returns a layer of 20 inputs after loading, and its numbers in float64, computed part by part."""
    layer = Linear(20, {f"p{i}": part for i, part in enumerate(parts)}, experts=experts)
    layer.set_format(BlockScaled(torch.float8_e4m3fn, "weight_scale", block))
    allocate(layer)
    generator = torch.Generator().manual_seed(3)
    shards = {
        name: shard.memory
        for name, shard in weight_mapping(layer)
        if isinstance(shard, Numbers | Scales)
    }
    numbers = []
    for name, shard in shards.items():
        drawn = torch.rand(shard.shape, generator=generator) + 0.5
        shard.copy_(drawn)
        if name.endswith(".weight_scale"):
            values = shards[name.removesuffix("_scale")].double()
            rows = torch.arange(len(values)) // (block[0] or len(values))
            columns = torch.arange(20) // (block[1] or 20)
            numbers.append(values * drawn.double()[rows][:, columns])
    layer.after_load(torch.float32)
    return layer, torch.cat(numbers).view(*layer.shape.stacked(sum(parts), 20))


@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize(
    ("parts", "block", "after"),
    [
        ((16, 8), (8, 8), (8, 8)),
        ((16, 5), (8, 8), (8, 8)),  # cut off at the end
        ((12, 12), (8, 8), (4, 8)),  # the second part begins in the middle of a block
        ((12, 7), (8, 8), (4, 8)),
        ((10, 10), (8, 8), (2, 8)),
        ((4, 12, 9), (8, None), (4, 20)),
        ((3, 5, 8), (8, None), (1, 20)),
        ((10, 7), (1, None), (1, 20)),
        ((10, 7), (None, None), (1, 20)),
        ((9,), (None, None), (1, 20)),
        ((9, 4), (None, 8), (1, 8)),
    ],
)
def test_a_row_finds_its_scale_without_its_part(
    parts: tuple[int, ...], block: Block, after: tuple[int, int], experts: int | None
) -> None:
    layer, exact = filled(parts, block, experts)
    weight = layer.operand
    assert weight.block == after and weight.constant and weight.scales is not None
    rows, columns = torch.arange(sum(parts)) // after[0], torch.arange(20) // after[1]
    assert weight.scales.shape[-2:] == (int(rows[-1]) + 1, int(columns[-1]) + 1)
    each = weight.scales.double()[..., rows, :][..., columns]
    assert torch.equal(weight.values.double() * each, exact)


@pytest.mark.parametrize(
    ("inputs", "parts", "padded"),
    [
        (512, (128, 80), 4),
        (640, (128, 80), 8),
        (600, (128, 80), None),  # the last block of columns is cut off
        (512, (128, 72), None),  # no multiple of 16
    ],
)
def test_scales_for_the_library_are_padded_once(
    inputs: int, parts: tuple[int, ...], padded: int | None
) -> None:
    layer = Linear(inputs, {f"p{i}": part for i, part in enumerate(parts)})
    layer.set_format(BlockScaled(torch.float8_e4m3fn, "weight_scale", (128, 128)))
    allocate(layer)
    torch.nn.init.uniform_(layer.get_parameter("weight_scale"), 1, 2)
    layer.after_load(torch.bfloat16)
    weight = layer.operand
    if padded is None:
        assert weight.library_scales is None
        return
    assert weight.scales is not None and weight.library_scales is not None
    assert weight.library_scales.shape == (2, padded) and weight.library_scales.is_contiguous()
    columns = weight.scales.shape[1]
    assert torch.equal(weight.library_scales[:, :columns], weight.scales)
    assert not weight.library_scales[:, columns:].any()
    assert layer.operand.library_scales is weight.library_scales, "not padded anew"
    assert [name for name, _ in layer.named_parameters()] == ["weight", "weight_scale"]


def test_scales_of_lower_blocks_for_the_library() -> None:
    """Each row has its own, next to each other for a block of columns."""
    layer = Linear(512, {"gate_proj": 192, "up_proj": 192})
    layer.set_format(BlockScaled(torch.float8_e4m3fn, "weight_scale", (128, 128)))
    allocate(layer)
    torch.nn.init.uniform_(layer.get_parameter("weight_scale"), 1, 2)
    layer.after_load(torch.bfloat16)
    weight = layer.operand
    assert weight.block == (64, 128)
    assert weight.scales is not None and weight.library_scales is not None
    assert torch.equal(weight.library_scales.t(), weight.scales[torch.arange(384) // 64])
    assert weight.library_scales.is_contiguous()


def test_a_weight_for_plain_products_is_dequantized_once() -> None:
    layer = Linear(20, 9, keeps_quantized=lambda *_: False)
    layer.set_format(BlockScaled(torch.float8_e4m3fn, "weight_scale", (8, 8)))
    allocate(layer)
    shards = dict(layer.named_parameters())
    shards["weight"].fill_(3)
    shards["weight_scale"].copy_(torch.arange(6).view(2, 3) + 1.0)
    layer.after_load(torch.bfloat16)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    weight = layer.operand
    assert weight.is_plain and weight.constant and weight.values.dtype == torch.bfloat16
    assert weight.values[::8, ::8].tolist() == [[3, 6, 9], [12, 15, 18]]
