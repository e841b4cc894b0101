"""kv_gather: rows written to scattered pages come back in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.kv_cache.gather import kv_gather, kv_gather_torch, kv_gather_triton
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

Request = tuple[int, int]  # first row, end
WAYS = [(kv_gather_torch, "cpu"), (kv_gather_triton, DEVICE)]


def check(
    gather: Callable[..., Tensor], requests: list[Request], page_size: int, width: int, device: str
) -> None:
    draw = torch.Generator().manual_seed(page_size)
    per_slot = -(-max(end for _, end in requests) // page_size)
    num_slots = len(requests) + 1
    pages = torch.randperm(num_slots * per_slot, generator=draw).to(torch.int32) + 1
    table = pages.view(num_slots, per_slot)
    cache = torch.full((len(pages) + 1, page_size, width), float("nan"))
    slots = torch.randperm(num_slots, generator=draw)[: len(requests)]
    wanted = []
    for slot, (first, end) in zip(slots.tolist(), requests, strict=True):
        rows = torch.randn(end, width, generator=draw)
        for i in range(end):
            cache[table[slot, i // page_size], i % page_size] = rows[i]
        wanted.append(rows[first:end])
        table[slot, -(-end // page_size) :] = 0
    lengths = torch.tensor([end - first for first, end in requests])
    starts = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    got = gather(
        cache.to(device),
        table.to(device),
        slots.to(device),
        torch.tensor([first for first, _ in requests], dtype=torch.int32, device=device),
        starts.to(device),
        int(starts[-1]),
    )
    assert torch.equal(got.cpu(), torch.cat(wanted))


@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_rows_of_any_part(requests: list[tuple[int, int]], page_size: int) -> None:
    spans = [(first, first + length) for first, length in requests]
    spans.append((0, 1))  # at least one request has rows
    check(kv_gather_torch, spans, page_size, 3, "cpu")


@pytest.mark.parametrize(("page_size", "width"), [(1, 72), (16, 72), (16, 1100)])
def test_kernel(page_size: int, width: int) -> None:
    spans = [(0, 40), (7, 7), (3, 133), (64, 65), (0, 64)]
    check(kv_gather_triton, spans, page_size, width, DEVICE)


@pytest.mark.parametrize(("gather", "device"), WAYS)
def test_more_requests_than_are_looked_at_at_once(
    gather: Callable[..., Tensor], device: str
) -> None:
    check(gather, [(i % 3, i % 3 + 1 + i % 2) for i in range(150)], 4, 5, device)


def test_wrong_shapes_are_named() -> None:
    cache, table = torch.zeros(2, 4, 3), torch.ones(1, 2, dtype=torch.int32)
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(AssertionError, match=r"slots \(1,\), first rows \(1,\), starts \(1,\)"):
        kv_gather(cache, table, one, one, one, 1)


def launches() -> None:
    """Launches latent rows, Llama's rows, and rows of V2-Lite's 16 heads."""
    for width in (576, 8 * 256, 16 * 320):
        integers = torch.empty(8, dtype=torch.int32, device="meta")
        kv_gather_triton(
            torch.empty(4096, 64, width, dtype=torch.bfloat16, device="meta"),
            torch.empty(128, 512, dtype=torch.int32, device="meta"),
            torch.empty(7, dtype=torch.int64, device="meta"),
            integers[:7],
            integers,
            8192,
        )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
