"""compute_out_cache_loc and look_up on a GPU against plain torch, in a CUDA graph and without a wait."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.kv_cache.out_cache_loc import (
    LookedUp,
    compute_out_cache_loc,
    compute_out_cache_loc_torch,
    look_up,
    look_up_torch,
)
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu

SLOTS, PAGES, PAGE_SIZE = 1024, 10_240, 16


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns decode rows, tokens and a page table for a context of 163,840 tokens."""
    draw = torch.Generator("cuda").manual_seed(rows)

    def integers(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=draw, device="cuda")

    table = integers(3_000_000, SLOTS, PAGES).int()
    slots, lengths = integers(SLOTS, rows), 1 + integers(PAGES * PAGE_SIZE, rows)
    return torch.stack((slots, lengths, integers(1088, rows))), integers(102_400, 1088), table


@pytest.mark.parametrize("rows", [1, 33, 256, 1023])
def test_as_plain_torch(rows: int) -> None:
    packed, tokens, table = inputs(rows)
    expected = look_up_torch(packed, tokens, table, page_size=PAGE_SIZE)
    with forbid_waiting():
        got = look_up(packed, tokens, table, page_size=PAGE_SIZE)
        out_cache_loc = compute_out_cache_loc(table, packed[0], packed[1] - 1, page_size=PAGE_SIZE)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert torch.equal(out_cache_loc, expected.out_cache_loc)


def test_in_a_cuda_graph() -> None:
    packed, tokens, table = inputs(40)
    into = look_up(packed, tokens, table, page_size=PAGE_SIZE)

    def both() -> tuple[LookedUp, Tensor]:
        found = look_up(packed, tokens, table, page_size=PAGE_SIZE, into=into)
        return found, compute_out_cache_loc(
            table, found.slots, found.positions, page_size=PAGE_SIZE
        )

    replay, (found, out_cache_loc) = captured(both)
    packed.copy_(inputs(41)[0][:, :40])
    replay()
    expected = look_up_torch(packed, tokens, table, page_size=PAGE_SIZE)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    again = compute_out_cache_loc_torch(table, packed[0], packed[1] - 1, page_size=PAGE_SIZE)
    assert torch.equal(out_cache_loc, again)
