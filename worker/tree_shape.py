"""The shape of the trees of drafts. The launcher reads it without msgspec and torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The trees of drafts of speculative decoding (`engine/speculation/tree.py`)."""

    topk: int  # nodes of a depth that are expanded, and children of each
    depth: int  # maximum length of a chain of drafts
    nodes: int  # of a tree that is verified, its root included
    slots: int  # maximum number of slots of a step with drafts

    @property
    def candidates(self) -> int:
        """Nodes among which those of a tree are chosen."""
        return self.topk + (self.depth - 1) * self.topk**2

    @property
    def expanded(self) -> int:
        """Nodes over which the drafter runs, for a slot."""
        return (self.depth - 1) * self.topk

    @property
    def cache_rows(self) -> int:
        """Rows of the KV cache for the nodes of a step, after the pages of the requests."""
        return self.slots * max(self.nodes, self.expanded)
