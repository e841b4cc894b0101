"""The growth of trees, and the choice of their nodes, against EAGLE-2's rule in plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mla_router.worker.kernels.kv_cache.tree_rows import Trees
from mla_router.worker.kernels.sampling.tree_choice import choose_nodes_torch, choose_nodes_triton
from mla_router.worker.kernels.sampling.tree_growth import (
    Beam,
    Candidates,
    Roots,
    grow_tree_torch,
    grow_tree_triton,
)
from mla_router.worker.tree_shape import TreeShape
from support.sm90 import compile_sm90

Node = tuple[int, ...]  # the tokens from the root on


@dataclass
class Drafter:
    """Random children: `topk` tokens of a node, with shares that depend on its path alone."""

    topk: int
    seed: int
    equal: bool  # all shares of one child of each node are 1, so that confidences are equal

    def children(self, node: Node) -> list[tuple[int, float]]:
        draw = random.Random(f"{self.seed} {node}")
        tokens = draw.sample(range(100), self.topk)
        shares = sorted((draw.random() / self.topk for _ in tokens), reverse=True)
        if self.equal:
            shares = [1.0] + [0.0] * (self.topk - 1)
        return list(zip(tokens, shares, strict=True))


def paper_tree(drafter: Drafter, shape: TreeShape) -> list[Node]:
    """Returns the nodes behind the root, best first, of equal ones the shallower first."""
    confidences: dict[Node, float] = {(): 1.0}
    beam: list[Node] = [()]
    found: list[Node] = []
    for _ in range(shape.depth):
        grown: list[Node] = []
        for node in beam:
            for token, share in drafter.children(node):
                child = (*node, token)
                confidences[child] = confidences[node] * share
                grown.append(child)
        found += grown
        beam = sorted(grown, key=lambda node: -confidences[node])[: shape.topk]
    return sorted(found, key=lambda node: -confidences[node])[: shape.nodes - 1]


@dataclass
class Growth:
    """Trees of drafters, in slots of random numbers and lengths, of which one has no room and one too many is there."""

    shape: TreeShape
    op: Any  # `grow_tree_torch` or `grow_tree_triton`
    choose: Any

    def __post_init__(self) -> None:
        count = self.shape.slots + 1
        self.slots = torch.tensor([3, 0, 5, 1, 6, 2][:count])
        self.lengths = torch.tensor([9, 1, 30, 7, 8, 12, 20], dtype=torch.int32)
        self.bounds = torch.full((count,), 100)
        self.bounds[1] = self.lengths[0]  # room for one node behind the root
        self.candidates = Candidates.empty(count, self.shape, torch.device("cpu"))
        self.roots = Roots(self.slots, self.bounds, self.lengths, 640, self.shape)

    def add(self, beam: Beam | None, children: list[Any], depth: int) -> Beam:
        """`children`: those of each node of the beam (`Drafter.children`), or the share NaN."""
        numbers = torch.tensor(children, dtype=torch.float64).view(-1, self.shape.topk, 2)
        tokens, shares = numbers[..., 0].long(), numbers[..., 1].log().float()
        found: Beam = self.op(self.candidates, beam, tokens, shares, depth, self.roots)
        return found

    def chosen(self) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[list[int]]]:
        """Returns the tokens of the nodes behind the roots, then parents, depths and ancestors of all nodes."""
        nodes = self.shape.nodes
        drafts = torch.zeros(7, nodes - 1, dtype=torch.int64)
        trees = Trees(*(torch.zeros(7, nodes, dtype=torch.int64) for _ in range(3)))
        self.choose(self.candidates, self.slots, drafts, trees)
        tokens, *rest = (found[self.slots].tolist() for found in (drafts, *trees))
        return tokens, *rest  # type: ignore[return-value]


def check_beam(growth: Growth, beam: Beam, nodes: list[list[Node]], depth: int) -> None:
    """`nodes`: those that are expanded, and before them those that were."""
    topk, expanded = growth.shape.topk, growth.shape.expanded
    for at, slot in enumerate(growth.slots.tolist()):
        rows = slice(at * topk, (at + 1) * topk)
        length = int(growth.lengths[slot])
        idle = length - 1 + depth > growth.bounds[at] or at >= growth.shape.slots
        assert beam.rows.slots[rows].tolist() == [slot] * topk
        assert beam.rows.lengths[rows].tolist() == [max(length - 1, 1)] * topk
        position = 0 if idle else length - 2 + depth
        assert beam.rows.positions[rows].tolist() == [position] * topk
        first = 640 + at * expanded + (depth - 1) * topk
        locations = [0] * topk if idle else [first + i for i in range(topk)]
        assert beam.rows.out_cache_loc[rows].tolist() == locations
        for node, mask in zip(nodes[at][-topk:], beam.visible[rows].tolist(), strict=True):
            seen = {of for i, of in enumerate(nodes[at]) if mask >> i & 1}
            assert seen == (set() if idle else {node[: n + 1] for n in range(len(node))})


OPS = pytest.mark.parametrize(
    ("op", "choose"),
    [(grow_tree_torch, choose_nodes_torch), (grow_tree_triton, choose_nodes_triton)],
    ids=["torch", "triton"],
)


@OPS
@pytest.mark.parametrize(
    ("topk", "depth", "nodes", "equal"),
    [
        (4, 3, 8, False),
        (4, 3, 8, True),
        (2, 1, 3, False),
        (3, 5, 40, True),
        (8, 2, 64, False),
    ],
)
def test_as_the_paper(
    topk: int, depth: int, nodes: int, equal: bool, op: Callable[..., Beam], choose: Any
) -> None:
    growth = Growth(TreeShape(topk, depth, nodes, 2), op, choose)
    drafters = [Drafter(topk, seed, equal) for seed in range(3)]
    beam: Beam | None = None
    own: list[list[Node]] = [[()] for _ in drafters]
    expanded: list[list[Node]] = [[] for _ in drafters]
    for level in range(1, depth + 1):
        children = [
            [drafter.children(node) for node in of]
            for drafter, of in zip(drafters, own, strict=True)
        ]
        beam = growth.add(beam, children, level)
        flat = [node for of in own for node in of]
        found = [
            (*flat[parent], token)
            for parent, token in zip(beam.parents.tolist(), beam.rows.tokens.tolist(), strict=True)
        ]
        own = [found[at * topk : (at + 1) * topk] for at in range(len(drafters))]
        if level < depth:
            expanded = [before + of for before, of in zip(expanded, own, strict=True)]
            check_beam(growth, beam, expanded, level)
    for drafter, tokens, parents, depths, ancestors in zip(drafters, *growth.chosen(), strict=True):
        paths: list[Node] = [()]
        for node, token in enumerate(tokens, 1):
            assert parents[node] < node
            paths.append((*paths[parents[node]], token))
        expected = paper_tree(drafter, growth.shape)
        # With equal shares those of the share 0 are any
        some = [node for node in paths[1:] if not equal or node in expected]
        certain = depth if equal else nodes - 1
        assert sorted(some) == sorted(expected) or (equal and len(some) >= min(certain, nodes - 1))
        assert len(set(paths)) == nodes
        best: Node = ()
        while (best := (*best, drafter.children(best)[0][0])) in paths:
            assert paths[len(best)] == best  # the chain of best nodes comes first
        assert depths == [len(path) for path in paths]
        for node, path in enumerate(paths):
            bits = sum(1 << paths.index(path[:length]) for length in range(len(path) + 1))
            assert ancestors[node] & (1 << 64) - 1 == bits, (node, path)


@OPS
def test_nan_is_the_worst(op: Callable[..., Beam], choose: Any) -> None:
    """A node without numbers is in the tree only behind its parent."""
    growth, nan = Growth(TreeShape(2, 2, 4, 1), op, choose), float("nan")
    roots = [[(5, 0.6), (6, nan)]] * 2
    beam = growth.add(None, roots, 1)
    growth.add(beam, [[(1, nan), (2, nan)], [(3, nan), (4, nan)]] * 2, 2)
    tokens, parents, *_ = growth.chosen()
    assert (tokens[0], parents[0]) == ([5, 1, 6], [0, 0, 1, 0])


@pytest.mark.parametrize("seed", range(3))
def test_ties_are_the_same(seed: int) -> None:
    """Both forms take the earlier one of equal confidences."""
    shape, draw = TreeShape(4, 3, 9, 2), random.Random(seed)
    tables = [
        [(token, draw.choice([0.1, 0.5, 0.5])) for token in range(3 * 4 * nodes)]
        for nodes in (1, 4, 4)
    ]
    results = []
    for op, choose in (
        (grow_tree_torch, choose_nodes_torch),
        (grow_tree_triton, choose_nodes_triton),
    ):
        growth, beam = Growth(shape, op, choose), None
        for depth, table in enumerate(tables, 1):
            beam = growth.add(beam, table, depth)
        results.append(growth.chosen())
    assert results[0] == results[1]


def launches() -> None:
    """Llama's trees, and the largest ones."""
    with torch.device("meta"):
        for shape in (TreeShape(4, 3, 8, 8), TreeShape(16, 5, 64, 8)):
            slots, lengths = (
                torch.empty(8, dtype=torch.int64),
                torch.empty(20, dtype=torch.int32),
            )
            roots = Roots(slots, slots, lengths, 6400, shape)
            candidates = Candidates.empty(8, shape, slots.device)
            shares = torch.empty(8, shape.topk)
            beam = grow_tree_triton(candidates, None, shares.long(), shares, 1, roots)
            shares = torch.empty(8 * shape.topk, shape.topk)
            grow_tree_triton(candidates, beam, shares.long(), shares, 2, roots)
            trees = Trees(*(torch.empty(20, shape.nodes, dtype=torch.int64) for _ in range(3)))
            drafts = torch.empty(20, shape.nodes - 1, dtype=torch.int64)
            choose_nodes_triton(candidates, slots, drafts, trees)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
