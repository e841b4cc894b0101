"""The choice of the nodes of a tree against EAGLE-2's rule in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from mla_router.worker.engine.speculation.candidates import Candidates
from mla_router.worker.tree_shape import TreeShape

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


def grow(drafters: list[Drafter], shape: TreeShape) -> tuple[Candidates, list[list[Node]]]:
    """Returns the candidates of a tree of each drafter, and the nodes that were expanded."""
    candidates = Candidates(shape)

    def add(of: list[list[Node]]) -> tuple[torch.Tensor, torch.Tensor]:
        children = [
            [drafter.children(node) for node in nodes]
            for drafter, nodes in zip(drafters, of, strict=True)
        ]
        numbers = torch.tensor(children, dtype=torch.float64)
        return numbers[..., 0].long(), numbers[..., 1].log().float()

    roots = [[()] for _ in drafters]
    tokens, shares = add(roots)
    beam = candidates.add_first(tokens[:, 0], shares[:, 0])
    nodes: list[list[Node]] = [[(token,) for token in row] for row in beam.tokens.tolist()]
    expanded: list[list[Node]] = [[] for _ in drafters]
    for _ in range(1, shape.depth):
        for of_all, of_beam in zip(expanded, nodes, strict=True):
            of_all += of_beam
        seen = beam.visible.tolist()
        for own, rows, bits in zip(nodes, expanded, seen, strict=True):
            for node, mask in zip(own, bits, strict=True):
                visible = {row for at, row in enumerate(rows) if mask >> at & 1}
                assert visible == {node[: length + 1] for length in range(len(node))}
        beam = candidates.add(beam, *add(nodes))
        nodes = [
            [(*of[origin], token) for origin, token in zip(origins, tokens, strict=True)]
            for of, origins, tokens in zip(
                nodes, beam.origins.tolist(), beam.tokens.tolist(), strict=True
            )
        ]
    return candidates, expanded


@pytest.mark.parametrize("equal", [False, True], ids=["random", "equal shares"])
@pytest.mark.parametrize(
    ("topk", "depth", "nodes"), [(4, 3, 8), (4, 3, 16), (2, 1, 3), (3, 5, 40), (8, 2, 64)]
)
def test_as_the_paper(topk: int, depth: int, nodes: int, equal: bool) -> None:
    shape = TreeShape(topk, depth, nodes, 8)
    drafters = [Drafter(topk, seed, equal) for seed in range(5)]
    candidates, _ = grow(drafters, shape)
    chosen = candidates.choose()
    for at, drafter in enumerate(drafters):
        tokens, parents = chosen.tokens[at].tolist(), chosen.parents[at].tolist()
        paths: list[Node] = [()]
        for node, token in enumerate(tokens, 1):
            assert parents[node] < node
            paths.append((*paths[parents[node]], token))
        expected = paper_tree(drafter, shape)
        # With equal shares those of the share 0 are any
        some = [node for node in paths[1:] if not equal or node in expected]
        certain = depth if equal else nodes - 1
        assert sorted(some) == sorted(expected) or (equal and len(some) >= min(certain, nodes - 1))
        assert len(set(paths)) == nodes
        assert chosen.depths[at].tolist() == [len(path) for path in paths]
        for node, path in enumerate(paths):
            bits = sum(1 << paths.index(path[:length]) for length in range(len(path) + 1))
            assert chosen.ancestors[at, node].item() & (1 << 64) - 1 == bits, (node, path)


def test_nan_is_the_worst() -> None:
    """A node without numbers is in the tree only behind its parent."""
    shape = TreeShape(2, 2, 4, 1)
    candidates = Candidates(shape)
    nan = float("nan")
    beam = candidates.add_first(torch.tensor([[5, 6]]), torch.tensor([[-0.5, nan]]))
    candidates.add(beam, torch.tensor([[[1, 2], [3, 4]]]), torch.full((1, 2, 2), nan))
    chosen = candidates.choose()
    assert chosen.tokens[0, :2].tolist() == [5, 6]
    assert chosen.parents[0].tolist()[3] in (1, 2)
