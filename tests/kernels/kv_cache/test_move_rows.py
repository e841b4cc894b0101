"""Moves of accepted nodes against a loop over rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mla_router.worker.kernels.kv_cache.fp8 import as_bytes
from mla_router.worker.kernels.kv_cache.move_rows import Layers, move_rows_torch, move_rows_triton
from mla_router.worker.step.result import UNUSED
from support.sm90 import compile_sm90
from support.triton_device import DEVICE


@pytest.mark.parametrize("op", [move_rows_torch, move_rows_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_as_a_loop(op: Callable[..., None], dtype: torch.dtype) -> None:
    """Layers of different widths; a path with all nodes, a short one, one of the root alone, and one without any."""
    page_size, pages, nodes, first_row = 4, 15, 6, 9 * 4
    layers = [torch.randn(pages, page_size, width).to(DEVICE, dtype) for width in (8, 8, 24)]
    before = [layer.clone() for layer in layers]
    paths = [[0, 2, 4, 5], [0, 3], [0], []]
    slots = torch.tensor([3, 0, 2, 1], device=DEVICE)
    lengths = torch.tensor([7, 9, 6, 12], dtype=torch.int32, device=DEVICE)
    table = torch.tensor(
        [[1, 2, 0], [3, 0, 0], [4, 5, 0], [6, 7, 8]], dtype=torch.int32, device=DEVICE
    )
    path = torch.tensor([p + [UNUSED] * (4 - len(p)) for p in paths], device=DEVICE)
    op(Layers.of(layers), path, slots, lengths, table, first_row=first_row, nodes=nodes)
    for layer, old in zip(layers, before, strict=True):
        layer, old = as_bytes(layer), as_bytes(old)
        expected, rows = old.clone().flatten(0, 1), old.flatten(0, 1)
        for at, (slot, nodes_of) in enumerate(zip(slots.tolist(), paths, strict=True)):
            for step, node in enumerate(nodes_of):
                position = int(lengths[slot]) - len(nodes_of) - 1 + step
                page = int(table[slot, position // page_size])
                to = page * page_size + position % page_size
                expected[to] = rows[first_row + at * nodes + node]
        # Page 0 belongs to no request
        assert torch.equal(layer.flatten(0, 1)[page_size:], expected[page_size:])


def launches() -> None:
    with torch.device("meta"):
        layers = Layers.of([torch.empty(100, 64, 2048, dtype=torch.bfloat16)] * 3)
        path, slots = torch.empty(8, 4, dtype=torch.int64), torch.empty(8, dtype=torch.int64)
        table, lengths = torch.empty(64, 64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
        move_rows_triton(layers, path, slots, lengths, table, first_row=6400, nodes=8)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
