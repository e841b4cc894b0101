"""decode_schedule against a walk over the blocks one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.attention.decode_schedule import (
    REQUESTS_AT_ONCE,
    SECOND_REQUEST,
    decode_schedule_torch,
    decode_schedule_triton,
)
from mla_router.worker.kernels.attention.decode_tiling import Tiling
from support.sm90 import compile_sm90

TILING = Tiling(16, 16, num_warps=4, num_stages=2, programs_per_sm=1)


@pytest.mark.parametrize("op", [decode_schedule_torch, decode_schedule_triton])
@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 300), min_size=1, max_size=8),
        st.lists(st.integers(1, 40), min_size=REQUESTS_AT_ONCE - 1, max_size=300),
    ),
    num_parts=st.integers(1, 70),
    min_blocks=st.sampled_from([1, 3]),
)
def test_walk(op, lengths: list[int], num_parts: int, min_blocks: int) -> None:  # type: ignore[no-untyped-def]
    schedule = op(
        torch.tensor(lengths, dtype=torch.int32),
        max_length=max(lengths),
        tiling=replace(TILING, min_blocks=min_blocks),
        num_parts=num_parts,
    )
    size = max(-(-sum(-(-length // 16) for length in lengths) // num_parts), min_blocks)
    grain = 1
    for tried in range(size, size + SECOND_REQUEST.value + 1):
        if sum(-(-length // (16 * tried)) for length in lengths) <= num_parts:
            size = grain = tried
            break
    # The owner of each block; with a grain, blocks without an owner count for the request before
    owners = [
        r for r, length in enumerate(lengths) for _ in range(-(-length // (16 * grain)) * grain)
    ]
    assert schedule.part_size.tolist() == [size]
    assert schedule.num_parts == num_parts
    assert schedule.first_requests.tolist() == [
        owners[part * size] if part * size < len(owners) else len(lengths)
        for part in range(num_parts)
    ]
    starts = [owners.index(r) for r in range(len(lengths))]
    assert schedule.block_starts.tolist() == [*starts, len(owners)]
    assert schedule.max_length == max(lengths)
    # Nothing is left out
    assert size * num_parts >= len(owners)


def launches() -> None:
    lengths = torch.empty(64, dtype=torch.int32, device="meta")
    decode_schedule_triton(lengths, max_length=4096, tiling=TILING, num_parts=264)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
