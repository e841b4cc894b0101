"""The placement of routed experts on ranks.

A layer has as many physical experts as its model has (logical) experts, or more: replicas of some. Each expert rank has an
equal part of them, whole ones in the order of their numbers, and no two replicas of one expert. A token's row in the batch decides
between replicas, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.parallel.ranks import Share
from mla_router.worker.model.shard import Members

# Columns of a table. With more, replicas are chosen nearly equally often: rows 64 n and later begin again with the first.
MAX_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """`layers[l][p]` is the expert of which physical expert p of layer l is a replica. The layer has `experts` experts, and
    `parts` ranks have equally many physical ones. Raises ModelError."""

    layers: tuple[tuple[int, ...], ...]
    experts: int
    parts: int

    def __post_init__(self) -> None:
        for layer, row in enumerate(self.layers):
            where = f"layer {layer} of the expert location"
            if set(row) != set(range(self.experts)):
                raise ModelError(f"{where}: not replicas of experts 0 to {self.experts - 1}")
            for part in range(self.parts):
                if len(set(own := self._own(row, part))) < len(own):
                    raise ModelError(f"{where}: rank {part} of {self.parts} has an expert twice")

    def members(self, layer: int, part: int) -> Members:
        """Returns the experts of one part."""
        return Members(self._own(self.layers[layer], part), self.experts)

    def table(self, layer: int, part: int) -> Tensor:
        """Returns [experts, C] int32: the index among the experts of `part` that row t of a batch uses as expert e is in
        [e, t % C], or -1 if it is in another part."""
        row = self.layers[layer]
        replicas = self._replicas(row)
        columns = min(lcm(*map(len, replicas)), MAX_COLUMNS)
        size = len(row) // self.parts
        chosen = [[own[column % len(own)] for column in range(columns)] for own in replicas]
        places = [[p % size if p // size == part else -1 for p in own] for own in chosen]
        return torch.tensor(places, dtype=torch.int32)

    def loads(self, counts: Tensor) -> Tensor:
        """Returns the pairs [layers, parts] float64 that each part computes, by counts [layers, experts] int64 of the pairs of each
        expert, whose replicas have equal shares."""
        experts = torch.tensor(self.layers, device=counts.device)
        replicas = torch.zeros_like(counts).scatter_add_(1, experts, torch.ones_like(experts))
        physical = (counts.double() / replicas).gather(1, experts)
        return physical.view(len(experts), self.parts, -1).sum(dim=2)

    def _own(self, row: Sequence[int], part: int) -> tuple[int, ...]:
        physical = Share(part, self.parts, "--ep-size").of(len(row), "physical experts")
        return tuple(row[physical.start : physical.end])

    def _replicas(self, row: Sequence[int]) -> list[list[int]]:
        """Returns the physical experts of each expert."""
        replicas: list[list[int]] = [[] for _ in range(self.experts)]
        for physical, expert in enumerate(row):
            replicas[expert].append(physical)
        return replicas


def trivial(layers: int, experts: int, parts: int, redundant: int = 0) -> Placement:
    """Returns the experts in order, and then the first ones again as `redundant` replicas. Raises ModelError."""
    row = tuple(physical % experts for physical in range(experts + redundant))
    return Placement((row,) * layers, experts, parts)


def balancedness(loads: Tensor) -> float:
    """Returns the mean of a layer's mean load over its largest load, 0 to 1, over the layers with any. loads [layers,
    parts]. 0: there are none."""
    busy = loads[loads.sum(dim=1) > 0]
    return float((busy.mean(dim=1) / busy.amax(dim=1)).mean()) if len(busy) else 0.0
