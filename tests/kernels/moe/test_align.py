"""moe_align, interpreted, against a sort of Python's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.moe import align as module
from mla_router.worker.kernels.moe.align import max_blocks, moe_align
from support.examples import examples


def check(ids: Tensor, experts: int, rows: int) -> None:
    blocks = moe_align(ids, experts, rows)
    flat = ids.flatten().tolist()
    expected_pairs, expected_experts = [], []
    for expert in range(experts):
        own = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        padding = -len(own) % rows
        expected_pairs += own + [len(flat)] * padding
        expected_experts += [expert] * ((len(own) + padding) // rows)
    assert blocks.count is not None and blocks.experts is not None and blocks.pairs is not None
    count = blocks.count.item()
    assert count == len(expected_experts) <= blocks.max_blocks
    assert blocks.experts[:count].tolist() == expected_experts
    assert blocks.pairs[: count * rows].tolist() == expected_pairs


@examples(20)
@given(
    tokens=st.integers(1, 60),
    experts=st.integers(1, 20),
    top_k=st.integers(1, 4),
    rows=st.sampled_from([16, 64]),
    seed=st.integers(0, 100),
)
def test_sorted_by_expert(tokens: int, experts: int, top_k: int, rows: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    check(torch.randint(experts, (tokens, top_k), generator=draw, dtype=torch.int32), experts, rows)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (40, 8), (40, 9)])
@pytest.mark.parametrize("chunk", [64, 256])
def test_pairs_without_an_expert_get_no_row(
    tokens: int, experts: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle rows between others, and idle rows alone; with as many bins as experts, and with more."""
    monkeypatch.setattr(module, "chunk_size", lambda _: chunk)
    draw = torch.Generator().manual_seed(tokens)
    ids = torch.randint(experts, (tokens, 2), generator=draw, dtype=torch.int32)
    ids[::3] = -1
    check(ids, experts, 16)
    check(torch.full_like(ids, -1), experts, 16)


@pytest.mark.parametrize("tokens", [1, 300])
def test_all_pairs_at_one_expert(tokens: int) -> None:
    check(torch.full((tokens, 1), 2, dtype=torch.int32), 5, 16)


@pytest.mark.parametrize("tokens", [100, 257, 700])
def test_in_chunks(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "chunk_size", lambda _: 64)
    draw = torch.Generator().manual_seed(tokens)
    check(torch.randint(9, (tokens, 2), generator=draw, dtype=torch.int32), 9, 16)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=12), st.sampled_from([16, 64]))
def test_never_more_blocks_than_there_is_room_for(counts: list[int], rows: int) -> None:
    needed = sum(-(-count // rows) for count in counts)
    assert needed <= max_blocks(sum(counts), len(counts), rows) <= sum(counts)
