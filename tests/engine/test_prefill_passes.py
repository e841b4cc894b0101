"""Passes cover each key of each chunk once, and at most the limit of keys at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.engine.attention.layout import ChunkExtent
from mla_router.worker.engine.attention.prefill_passes import plan_passes
from mla_router.worker.engine.upload import Upload

CPU = torch.device("cpu")
chunks = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=5)


@given(spans=chunks, max_keys=st.integers(1, 120), window=st.none() | st.integers(1, 60))
def test_every_key_once(spans: list[tuple[int, int]], max_keys: int, window: int | None) -> None:
    extents = [ChunkExtent(7 + i, start, length) for i, (start, length) in enumerate(spans)]
    passes = plan_passes(extents, 4, max_keys, Upload(CPU), window)
    assert [one.work.causal for one in passes] == [True] + [False] * (len(passes) - 1)
    seen: list[list[int]] = [[] for _ in extents]
    for one in passes:
        assert one.slots.tolist() == [extent.slot for extent in extents]
        new = sum(extent.length for extent in extents)
        assert one.work.num_keys <= max(max_keys, new)
        assert one.work.key_starts.tolist()[-1] == one.work.num_keys
        assert one.work.num_queries == new
        firsts = one.first_rows.tolist()
        own = [(extent.start, extent.length) for extent in extents]
        keys_of = [keys for _, keys in one.work.extents]
        assert one.has_own_keys == (list(zip(firsts, keys_of, strict=True)) == own)
        for i, (queries, keys) in enumerate(one.work.extents):
            assert queries == extents[i].length
            seen[i] += range(firsts[i], firsts[i] + keys)
            if one.work.gaps:
                assert firsts[i] + keys + one.work.gaps[i] == extents[i].start
    for extent, keys_seen in zip(extents, seen, strict=True):
        first = max(0, extent.start + 1 - window) if window else 0
        assert sorted(keys_seen) == list(range(first, extent.end))


def test_short_prefixes_take_one_pass() -> None:
    (only,) = plan_passes([ChunkExtent(0, 30, 10), ChunkExtent(1, 0, 5)], 4, 45, Upload(CPU))
    assert only.work.extents == ((10, 40), (5, 5))
