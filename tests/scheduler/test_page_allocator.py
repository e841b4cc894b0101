"""Each page has one owner, and page 0 is never allocated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.scheduler.page_allocator import PageAllocator


@given(st.lists(st.integers(0, 5), max_size=30), st.randoms())
def test_no_page_has_two_owners(counts: list[int], random) -> None:
    allocator, held = PageAllocator(20), list[list[int]]()
    for count in counts:
        if count > allocator.num_free:
            allocator.free(held.pop(random.randrange(len(held))))
        else:
            held.append(allocator.allocate(count))
            assert len(held[-1]) == count
        pages = [page for some in held for page in some]
        assert sorted([*pages, *allocator.free_pages]) == list(range(1, 21))


def test_allocating_too_many_pages_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="count=3 free=2"):
        PageAllocator(2).allocate(3)


def test_one_page_is_the_smallest_pool() -> None:
    assert PageAllocator(1).allocate(1) == [1]
    with pytest.raises(AssertionError, match="num_pages=0"):
        PageAllocator(0)
