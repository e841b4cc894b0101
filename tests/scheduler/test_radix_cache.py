"""The prefix cache against a model: a set of the prefixes of its pages, and a counter for each lock."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mla_router.worker.scheduler.radix_cache import Node, RadixCache
from support.examples import examples

Prefix = tuple[str, tuple[int, ...]]  # salt, and all tokens up to the end of a page
# Different pages, and a part of another page.
_pages = st.lists(st.integers(0, 1), max_size=8)
_rest = st.integers(0, 63)
_salts = st.sampled_from(["", "a"])


class RadixCacheMachine(RuleBasedStateMachine):
    """A cached page is identified by all tokens up to its end."""

    @initialize(page_size=st.sampled_from([1, 3, 16, 32, 64]))
    def start(self, page_size: int) -> None:
        self.size = page_size
        self.cache = RadixCache(page_size)
        self.model: dict[Prefix, int] = {}  # prefix -> its last page
        self.locked: list[tuple[Node, Prefix]] = []
        self.used: dict[Prefix, int] = {}
        self.versions: dict[int, frozenset[Prefix]] = {}
        self.clock = 0
        self.next_page = 1

    def text(self, pages: list[int], rest: int = 0) -> list[int]:
        """Draws tokens whose pages differ only in their last token."""
        tokens = [token for page in pages for token in (*range(self.size - 1), -page)]
        return tokens + list(range(rest % self.size))

    def prefixes(self, salt: str, tokens: list[int]) -> list[Prefix]:
        ends = range(self.size, len(tokens) + 1, self.size)
        return [(salt, tuple(tokens[:end])) for end in ends]

    def cached_prefixes(self, salt: str, tokens: list[int]) -> list[Prefix]:
        found = []
        for prefix in self.prefixes(salt, tokens):
            if prefix not in self.model:
                break
            found.append(prefix)
        return found

    def touch(self, prefixes: list[Prefix]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.used[prefix] = self.clock

    def is_locked(self, prefix: Prefix) -> bool:
        salt, tokens = prefix
        return any(s == salt and t[: len(tokens)] == tokens for _, (s, t) in self.locked)

    @rule(salt=_salts, content=_pages)
    def insert(self, salt: str, content: list[int]) -> None:
        tokens = self.text(content)
        prefixes = self.prefixes(salt, tokens)
        pages = list(range(self.next_page, self.next_page + len(prefixes)))
        self.next_page += len(pages)
        _, existing = self.cache.insert(self.cache.root(salt), tokens, pages)
        assert existing == len(self.cached_prefixes(salt, tokens))
        for prefix, page in list(zip(prefixes, pages, strict=True))[existing:]:
            self.model[prefix] = page
        self.touch(prefixes)

    @rule(salt=_salts, content=_pages, rest=_rest, lock=st.booleans())
    def match(self, salt: str, content: list[int], rest: int, lock: bool) -> None:
        tokens = self.text(content, rest)
        node, pages = self.cache.match(salt, tokens)
        found = self.cached_prefixes(salt, tokens)
        assert pages == [self.model[prefix] for prefix in found]
        self.touch(found)
        if lock:
            self.cache.lock(node)
            self.locked.append((node, found[-1] if found else (salt, ())))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def extend_a_locked_prefix(self, data: st.DataObject) -> None:
        node, (salt, start) = data.draw(st.sampled_from(self.locked))
        tail = self.text(data.draw(_pages))
        prefixes = self.prefixes(salt, [*start, *tail])[len(start) // self.size :]
        pages = list(range(self.next_page, self.next_page + len(prefixes)))
        self.next_page += len(pages)
        _, existing = self.cache.insert(node, tail, pages)
        for prefix, page in list(zip(prefixes, pages, strict=True))[existing:]:
            assert prefix not in self.model
            self.model[prefix] = page
        self.touch(prefixes)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.locked))
        self.locked.remove(entry)
        self.cache.unlock(entry[0])

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        evictable = [prefix for prefix in self.model if not self.is_locked(prefix)]
        freed = self.cache.evict(count)
        assert len(freed) == min(count, len(evictable))
        by_page = {page: prefix for prefix, page in self.model.items()}
        for page in freed:
            prefix = by_page[page]
            assert not self.is_locked(prefix)
            del self.model[prefix]
        # No remaining page is below an evicted one: ends go first.
        for salt, tokens in self.model:
            assert len(tokens) == self.size or (salt, tokens[: -self.size]) in self.model
        # The evicted pages were unused for at least as long as every remaining unlocked end.
        if freed:
            tails = [
                prefix
                for prefix in self.model
                if not self.is_locked(prefix)
                and not any(s == prefix[0] and t[: -self.size] == prefix[1] for s, t in self.model)
            ]
            newest_gone = max(self.used[by_page[page]] for page in freed)
            gone = {by_page[page] for page in freed}
            for salt, tokens in tails:
                had_child = any(s == salt and t[: -self.size] == tokens for s, t in gone)
                assert had_child or self.used[salt, tokens] >= newest_gone

    @rule(salt=_salts, content=_pages)
    def cut(self, salt: str, content: list[int]) -> None:
        node, _ = self.cache.match(salt, self.text(content))
        path = self.cached_prefixes(salt, self.text(content))
        self.touch(path)
        gone = []
        while path and not self.is_locked(path[-1]):
            end = len(path[-1][1])
            if any(s == salt and len(t) > end and t[:end] == path[-1][1] for s, t in self.model):
                break
            gone.append(self.model.pop(path.pop()))
        assert sorted(self.cache.cut(node)) == sorted(gone)

    @invariant()
    def an_unchanged_version_means_unchanged_content(self) -> None:
        if hasattr(self, "cache"):
            content = frozenset(self.model)
            assert self.versions.setdefault(self.cache.version, content) == content

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        pages = [page for node in self.cache for page in node.pages]
        assert sorted(pages) == sorted(self.model.values())
        assert self.cache.num_pages == len(pages)
        assert self.cache.num_evictable == sum(not self.is_locked(p) for p in self.model)


RadixCacheMachine.TestCase.settings = examples(100, stateful_step_count=40, deadline=None)
TestRadixCache = RadixCacheMachine.TestCase


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_a_match_ends_within_a_node(page_size: int, before: int) -> None:
    """Five pages in one node, behind a node of `before` pages; three of them match. The node is split once."""
    cache = RadixCache(page_size)
    tokens = list(range(page_size * (before + 5)))
    start = tokens[: page_size * before]
    cache.insert(cache.root(""), start, list(range(before)))
    other = [*start, *(-1 for _ in range(page_size))]
    cache.insert(cache.root(""), other, [*range(before), 99])
    cache.insert(cache.root(""), tokens, list(range(before + 5)))
    asked = tokens[: page_size * (before + 3)]
    different = [-2] * (2 * page_size)
    nodes = sum(1 for _ in cache)
    assert cache.match("", asked + different)[1] == list(range(before + 3))
    assert sum(1 for _ in cache) == nodes + 1


def test_many_salts_leave_nothing_behind() -> None:
    cache = RadixCache(page_size=1)
    for i in range(1000):
        cache.insert(cache.root(f"salt {i}"), [1], [i])
        assert cache.evict(1) == [i]
    assert sum(1 for _ in cache) <= 32


def test_a_node_that_is_locked_and_unlocked_again_and_again_stands_in_the_queue_once() -> None:
    cache = RadixCache(1)
    node, _ = cache.insert(cache.root(""), [1, 2], [1, 2])
    for _ in range(100):
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._queue) == 1
