"""The weights that ranks load, put together, are those of the whole checkpoint, in every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.comm.groups import Groups
from mla_router.worker.model.linear import Linear, LinearShape
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.parallel.balance import balanced
from mla_router.worker.model.parallel.placement import Placement
from support.positions import Position
from support.quantized_folders import Format, quantize_folder
from support.tiny_model import CONFIGS, write_tiny_model

# Heads, and halves of columns, are whole blocks of 16; the last block is cut off
CONFIG = CONFIGS["v3_halves"] | {
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 120,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
}


REPLICAS = balanced([[0, 0, 9, 1, 1, 1, 1, 0]] * 3, 2, 2)


@pytest.mark.parametrize(("expert_parts", "placement"), [(1, None), (2, None), (2, REPLICAS)])
@pytest.mark.parametrize(
    "kind", [None, Format("block", (16, 16)), Format("channel"), Format("tensor"), Format("int8")]
)
def test_pieces_are_those_of_the_whole(
    tmp_path: Path, kind: Format | None, expert_parts: int, placement: Placement | None
) -> None:
    folder = tmp_path / "plain"
    write_tiny_model(folder, **CONFIG)
    if kind is not None:
        folder = tmp_path / "quantized"
        quantize_folder(tmp_path / "plain", folder, kind)
    whole = linears(folder)
    for rank in range(2):
        pieces_of = linears(
            folder,
            groups=Groups(Position(rank, 2)),
            expert_parts=expert_parts,
            placement=placement,
        )
        for name, own in pieces_of.items():
            assert torch.equal(dense(own), piece(dense(whole[name]), own.shape)), name
            if own.bias is not None:
                bias = whole[name].bias
                assert bias is not None
                rows = torch.cat(pieces(bias, own.shape, -1), dim=-1)
                assert torch.equal(own.bias, rows if own.adds_bias else torch.zeros_like(rows))


def linears(folder: Path, **how: Any) -> dict[str, Linear]:
    model = load_model(folder, device="cpu", dtype=torch.float32, **how)
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}


def dense(layer: Linear) -> Tensor:
    return layer.operand.dense(torch.float32).values


def piece(weight: Tensor, shape: LinearShape) -> Tensor:
    """Returns the part of a whole `weight` that belongs to a rank with `shape`."""
    if shape.stack is not None:
        weight = weight[list(shape.stack.indices)]
    rows = torch.cat(pieces(weight, shape, -2), dim=-2)
    return rows[..., shape.columns.start : shape.columns.end]


def pieces(weight: Tensor, shape: LinearShape, dim: int) -> list[Tensor]:
    """Returns the rank's rows of each joined matrix."""
    parts = torch.split(weight, [rows.full for rows in shape.rows], dim)
    return [
        part.narrow(dim, rows.start, rows.length)
        for part, rows in zip(parts, shape.rows, strict=True)
    ]
