"""Steps need little padding in the captured sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mla_router.worker.engine.runners.sizes import decode_sizes, prompt_sizes


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 7, 8, 100, 256, 1000])
def test_decode_graphs_pad_little(largest: int) -> None:
    sizes = decode_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    for batch in range(1, largest + 1):
        taken = min(size for size in sizes if size >= batch)
        assert taken - batch <= max(3, batch // 4)
        assert batch & (batch - 1) or taken == batch


@pytest.mark.parametrize("largest", [0, 15, 16, 100, 4096])
def test_prompts_pad_little(largest: int) -> None:
    sizes = prompt_sizes(largest)
    assert sizes == sorted(set(sizes)) and all(16 <= size <= largest for size in sizes)
    assert all(after <= 1.5 * size for size, after in pairwise(sizes))
    assert largest < 16 or sizes[-1] > largest / 1.5
