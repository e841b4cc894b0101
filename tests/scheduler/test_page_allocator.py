"""Pages are handed out once, and never page 0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.scheduler.page_allocator import PageAllocator


@given(st.lists(st.integers(0, 5), max_size=30), st.randoms())
def test_no_page_is_ever_in_two_hands(counts: list[int], random) -> None:
    allocator, held = PageAllocator(20), list[list[int]]()
    for count in counts:
        if count > allocator.num_free:
            allocator.free(held.pop(random.randrange(len(held))))
        else:
            held.append(allocator.allocate(count))
        pages = [page for some in held for page in some]
        assert sorted([*pages, *allocator.free_pages]) == list(range(1, 21))


def test_more_than_there_is_is_a_broken_contract() -> None:
    with pytest.raises(AssertionError, match="count=3 free=2"):
        PageAllocator(2).allocate(3)
