"""The prefix cache: a radix tree over pages of tokens (RadixAttention, SGLang, arXiv 2312.07104).

An edge holds whole pages, so prefixes are shared in steps of `page_size` tokens. A request locks the last node of its
prefix and all nodes above it. Unlocked nodes can be evicted, the least recently used leaf first. Each cache salt has a
separate tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from mla_router.worker.scheduler.window_pages import WindowPages


@dataclass(slots=True, eq=False)
class Node:
    """An edge of the tree and its subtree. `tokens` are the tokens in `pages`, in order."""

    parent: Node | None
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)  # by their first page
    locks: int = 0  # requests that read this node or one below it
    last_used: int = 0
    queued: bool = False  # has an entry in the eviction queue


class RadixCache:
    """Owns pages from `insert` until `evict` or `cut` returns them. The caller then takes their window pages."""

    def __init__(self, page_size: int, windows: WindowPages | None = None) -> None:
        """`windows`: the window pages of the pages, if they have any. They follow their pages."""
        self.page_size = page_size
        self.num_pages = 0
        self.num_evictable = 0  # pages in nodes without a lock, and their window pages
        self._windows = windows
        self.version = 0  # changes with the content of the cache
        self._roots: dict[str, Node] = {}
        self._roots_limit = 16
        self._clock = 0
        self._order = 0  # orders queue entries of one clock tick
        self._queue: list[tuple[int, int, Node]] = []

    def root(self, salt: str) -> Node:
        if salt not in self._roots:
            # Clients choose salts, so their number is limited
            if len(self._roots) >= self._roots_limit:
                self._roots = {k: v for k, v in self._roots.items() if v.children or v.locks}
                self._roots_limit = 2 * len(self._roots) + 16
            self._roots[salt] = Node(parent=None)
        return self._roots[salt]

    def match(self, salt: str, tokens: list[int]) -> tuple[Node, list[int]]:
        """Returns the longest cached prefix of `tokens`: its last node and its pages."""
        return self._descend(self.root(salt), tokens)

    def insert(self, start: Node, tokens: list[int], pages: list[int]) -> tuple[Node, int]:
        """Inserts `tokens` after the node `start`: whole pages, whose KV cache is in `pages`.

        Returns the last node of `tokens` and the number of leading pages that were cached before. The cache takes
        ownership of the other pages; those that were cached before stay with the caller.
        """
        assert len(tokens) == len(pages) * self.page_size, f"{len(tokens)=} {len(pages)=}"
        node, cached = self._descend(start, tokens)
        existing = len(cached)
        if existing < len(pages):
            new_tokens = tokens[existing * self.page_size :]
            leaf = Node(node, new_tokens, pages[existing:], last_used=self._clock)
            node.children[tuple(leaf.tokens[: self.page_size])] = leaf
            self.version += 1
            self.num_pages += len(leaf.pages)
            self._make_evictable(leaf.pages)
            node = leaf
        self._enqueue(node)
        return node, existing

    def lock(self, node: Node) -> None:
        """Protects the path to `node` from eviction, until one `unlock` for each `lock`."""
        at: Node | None = node
        while at is not None:
            if at.locks == 0:
                self.num_evictable -= self._weight(at.pages)
                if self._windows is not None:
                    self._windows.lock(at.pages)
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            assert at.locks > 0, "unlock without lock"
            at.locks -= 1
            if at.locks == 0:
                self._make_evictable(at.pages)
            at = at.parent
        self._enqueue(node)

    def evict(self, count: int) -> list[int]:
        """Evicts up to `count` pages from the ends of the least recently used leaves, and returns them."""
        freed: list[int] = []
        self.version += 1
        while len(freed) < count and self._queue:
            used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if not self._is_evictable_leaf(node):
                continue  # locked or extended since then; queued again when it becomes an unlocked leaf
            if node.last_used != used:
                self._enqueue(node)
                continue
            keep = max(0, len(node.pages) - (count - len(freed)))
            freed += node.pages[keep:]
            self.num_pages -= len(node.pages) - keep
            self.num_evictable -= self._weight(node.pages[keep:])
            if keep:
                del node.pages[keep:], node.tokens[keep * self.page_size :]
                self._enqueue(node)
            else:
                self._remove(node)
        return freed

    def cut(self, node: Node) -> list[int]:
        """Removes `node` and the nodes above it, up to the first that is locked or has another child. Returns their
        pages."""
        freed: list[int] = []
        self.version += 1
        while self._is_evictable_leaf(node):
            parent = node.parent
            assert parent is not None
            freed += node.pages
            self._remove(node)
            node = parent
        self.num_pages -= len(freed)
        self.num_evictable -= self._weight(freed)
        return freed

    def __iter__(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _descend(self, start: Node, tokens: list[int]) -> tuple[Node, list[int]]:
        """Follows `tokens` down from `start`, and marks the nodes as used. Splits the last node if only its first pages
        match. Returns the last node that matches, and the pages from `start` to there."""
        self._clock += 1
        node, pages, at = start, list[int](), 0
        while child := node.children.get(tuple(tokens[at : at + self.page_size])):
            common = self._common_pages(child, tokens, at)
            if common < len(child.pages):
                child = self._split(child, common)
            child.last_used = self._clock
            pages += child.pages
            at += common * self.page_size
            node = child
        return node, pages

    def _make_evictable(self, pages: list[int]) -> None:
        self.num_evictable += self._weight(pages)
        if self._windows is not None:
            self._windows.unlock(pages)

    def _weight(self, pages: list[int]) -> int:
        """Returns the number of `pages` and their window pages."""
        own = 0 if self._windows is None else self._windows.count(pages)
        return len(pages) + own

    def _common_pages(self, node: Node, tokens: list[int], at: int) -> int:
        """Returns how many leading pages of `node` match `tokens[at:]`. The first page is known to match."""
        edge, size = node.tokens, self.page_size
        if edge == tokens[at : at + len(edge)]:  # fast path: one comparison in C
            return len(node.pages)
        pages = 1
        while (
            edge[pages * size : (pages + 1) * size]
            == (tokens[at + pages * size : at + (pages + 1) * size])
        ):
            pages += 1
        return pages

    def _split(self, node: Node, pages: int) -> Node:
        """Splits `node` after its first `pages` pages. Returns the new upper node. Requests that lock `node` keep the
        same prefix."""
        cut = pages * self.page_size
        assert node.parent is not None
        upper = Node(
            node.parent, node.tokens[:cut], node.pages[:pages], {}, node.locks, node.last_used
        )
        node.parent.children[tuple(upper.tokens[: self.page_size])] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[cut:], node.pages[pages:]
        upper.children[tuple(node.tokens[: self.page_size])] = node
        return upper

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[tuple(node.tokens[: self.page_size])]
        node.parent = None
        self._enqueue(parent)

    def _is_evictable_leaf(self, node: Node) -> bool:
        return node.parent is not None and not node.children and node.locks == 0

    def _enqueue(self, node: Node) -> None:
        if self._is_evictable_leaf(node) and not node.queued:
            node.queued = True
            self._order += 1
            heapq.heappush(self._queue, (node.last_used, self._order, node))
