"""look_up on a GPU against plain torch, in a CUDA graph and without a wait."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.kv_cache.out_cache_loc import look_up, look_up_torch
from mla_router.worker.step.plan import RowKind
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu

SLOTS, PAGES, PAGE_SIZE, DRAFTS = 1024, 10_240, 16, 3


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns rows, their kinds, and last tokens, drafts, lengths and page table of slots with a context of 163,840 tokens."""
    draw = torch.Generator("cuda").manual_seed(rows)

    def integers(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=draw, device="cuda")

    table = integers(3_000_000, SLOTS, PAGES).int()
    slots, lengths = integers(SLOTS, rows), 1 + integers(PAGES * PAGE_SIZE, rows)
    packed = torch.stack((slots, lengths, integers(102_400, rows)))
    known = 1 + integers(PAGES * PAGE_SIZE, SLOTS)
    kinds = integers(len(RowKind), rows).to(torch.int8)
    packed[2] = torch.where(kinds == RowKind.DRAFT, 1 + packed[2] % DRAFTS, packed[2])
    drafts = integers(102_400, SLOTS, DRAFTS)
    return packed, kinds, integers(102_400, SLOTS), drafts, known.int(), table


@pytest.mark.parametrize("rows", [1, 33, 256, 1023])
def test_as_plain_torch(rows: int) -> None:
    given = inputs(rows)
    expected = look_up_torch(*given, page_size=PAGE_SIZE)
    with forbid_waiting():
        got = look_up(*given, page_size=PAGE_SIZE)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_in_a_cuda_graph() -> None:
    given = inputs(40)
    into = look_up(*given, page_size=PAGE_SIZE)
    replay, found = captured(lambda: look_up(*given, page_size=PAGE_SIZE, into=into))
    for tensor, other in zip(given[:2], inputs(41)[:2], strict=True):
        tensor.copy_(other[..., :40])
    replay()
    expected = look_up_torch(*given, page_size=PAGE_SIZE)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
