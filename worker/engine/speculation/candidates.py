"""The choice of the nodes of dynamic trees of drafts (EAGLE-2, arXiv:2406.16858, section 4).

The confidence of a node is the share that the drafter gives to its token, times the confidence of its parent. In each depth
the nodes of the largest confidence are expanded. At last the tree has the nodes of the largest confidence of all depths. A
node comes behind its parent in this order, since it has no larger confidence, so the nodes are a tree.

All shapes are fixed, so that a CUDA graph can have the choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mla_router.worker.tree_shape import TreeShape


class Beam(NamedTuple):
    """The nodes of S trees that are expanded next, [S, K] each."""

    tokens: Tensor  # int64
    confidences: Tensor  # float32, logarithms
    candidates: Tensor  # int64, their numbers among all candidates
    visible: Tensor  # int64: bit i: node i of those that are expanded is the node itself or an ancestor of it
    origins: Tensor  # int64, the place of their parent in the beam before


class Chosen(NamedTuple):
    """S trees of N nodes. Node 0 is the root."""

    tokens: Tensor  # [S, N - 1] int64, of the nodes behind the root
    parents: Tensor  # [S, N] int64, with `depths` and `ancestors` as of `Trees`
    depths: Tensor
    ancestors: Tensor


class Candidates:
    """The nodes of S trees so far. The children of a node are next to each other, and shallower nodes come first."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape
        self._depth = 0
        self._count = 0
        self._tokens: list[Tensor] = []
        self._confidences: list[Tensor] = []
        self._parents: list[Tensor] = []  # numbers of candidates, and -1 for the root

    def add_first(self, tokens: Tensor, shares: Tensor) -> Beam:
        """Adds the children of the roots: `tokens` [S, K] int64, and the logarithms of their `shares` [S, K] float32."""
        self._add(tokens, _ordered(shares), torch.full_like(tokens, -1))
        numbers = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return Beam(tokens, self._confidences[0], numbers, 1 << numbers, torch.zeros_like(tokens))

    def add(self, beam: Beam, tokens: Tensor, shares: Tensor) -> Beam:
        """Adds the children of `beam`, [S, K, K]. Returns the best of them."""
        slots, width, _ = tokens.shape
        first = self._count
        confidences = (beam.confidences[..., None] + _ordered(shares)).view(slots, -1)
        parents = beam.candidates.repeat_interleave(width, dim=1)
        tokens = tokens.view(slots, -1)
        self._add(tokens, confidences, parents)
        best, at = confidences.topk(width, dim=1)
        origins = at // width
        own = 1 << (self._depth - 1) * width + torch.arange(width, device=at.device)
        visible = beam.visible.gather(1, origins) | own
        return Beam(tokens.gather(1, at), best, first + at, visible, origins)

    def choose(self) -> Chosen:
        """Returns the trees of the best candidates."""
        confidences, tokens = torch.cat(self._confidences, dim=1), torch.cat(self._tokens, dim=1)
        slots, count = tokens.shape
        nodes, device = self._shape.nodes, tokens.device
        # Stable: of equal candidates the shallower one is first, which may be the parent of the other
        order = confidences.sort(dim=1, descending=True, stable=True).indices
        chosen = order[:, : nodes - 1].sort(dim=1).values
        # The number of a candidate's node; number 0 is the root's
        numbers = torch.zeros(slots, count + 1, dtype=torch.int64, device=device)
        behind_root = torch.arange(1, nodes, device=device).expand_as(chosen)
        numbers.scatter_(1, chosen + 1, behind_root)
        parents = numbers.gather(1, torch.cat(self._parents, dim=1).gather(1, chosen) + 1)
        parents = torch.cat((parents.new_zeros(slots, 1), parents), dim=1)
        topk = self._shape.topk
        depths = torch.where(chosen < topk, 1, (chosen - topk) // topk**2 + 2)
        depths = torch.cat((depths.new_zeros(slots, 1), depths), dim=1)
        ancestors = (1 << torch.arange(nodes, device=device)).expand(slots, -1)
        above = parents
        for _ in range(self._shape.depth):
            ancestors = ancestors | 1 << above
            above = parents.gather(1, above)
        return Chosen(tokens.gather(1, chosen), parents, depths, ancestors)

    def _add(self, tokens: Tensor, confidences: Tensor, parents: Tensor) -> None:
        self._tokens.append(tokens)
        self._confidences.append(confidences)
        self._parents.append(parents)
        self._depth += 1
        self._count += tokens.shape[1]


def _ordered(shares: Tensor) -> Tensor:
    """Returns logarithms of shares that are at most 0 and no NaN, so that confidences fall along a path."""
    return shares.nan_to_num(nan=float("-inf"), neginf=float("-inf")).clamp_max(0)
