"""Programs that take tile after tile: each tile is computed once, and programs have about the same work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.moe.gemm_programs import share_of, tile_in
from support.triton_device import DEVICE


@triton.jit
def _take(routed_taken, shared_taken, spent, routed, shared, COST: tl.constexpr):
    program = tl.program_id(0)
    busy, head, begin, end = share_of(program, routed, shared, COST)
    time = 0
    for tile in range(tl.where(program < busy, program, shared), shared, tl.maximum(busy, 1)):
        tl.atomic_add(shared_taken + tile, 1)
        time += COST
    for round_ in range(begin, end):
        tl.atomic_add(routed_taken + tile_in(round_, program, busy, head), 1)
        time += 1
    tl.store(spent + program, time)


def taken(programs: int, routed: int, shared: int, cost: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the number of times that each routed and each shared tile is computed, and the time of each program in
    routed tiles."""
    counts = [torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (routed, shared, programs)]
    _take[(programs,)](*counts, routed, shared, cost)
    routed_taken, shared_taken, spent = counts
    return routed_taken, shared_taken, spent


@settings(deadline=None)
@given(
    programs=st.integers(1, 7),
    routed=st.integers(1, 60),
    shared=st.integers(0, 30),
    cost=st.integers(1, 3),
)
def test_each_tile_is_taken_once(programs: int, routed: int, shared: int, cost: int) -> None:
    routed_taken, shared_taken, spent = taken(programs, routed, shared, cost)
    assert routed_taken.eq(1).all() and shared_taken.eq(1).all()
    assert spent.sum().item() == routed + cost * shared
    assert spent.max().item() < (routed + cost * shared) / programs + cost + 1


def test_a_prompt_of_v2_lite() -> None:
    """1,024 tokens on 132 multiprocessors: 64 routed and 8 shared blocks of 8 tiles. A shared tile takes as long as two
    routed ones. Five rounds are the minimum."""
    spent = taken(132, 64 * 8, 8 * 8, 2)[2]
    assert spent.max().item() == 5
