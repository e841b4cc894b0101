"""The placement of routed experts on ranks.

A layer has one or more physical experts for each expert of the model: its replicas. The physical experts are numbered,
and divided among the expert ranks in equal parts of consecutive numbers. A part has no expert twice. The row of a token
in the batch decides between replicas: it is the same on all ranks.
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

# Maximum number of columns of a table. A number of replicas that does not divide them is used nearly evenly.
MAX_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of the routed experts. `layers[l][p]` is the expert of which physical expert p of layer l is a
    replica. Each layer has `experts` experts.
    `parts`: number of expert ranks. Raises ModelError."""

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
        """Returns the table [experts, C] int32 of a part, for `moe_routing`. The replica of expert e for row t of a batch
        is [e, t % C], an index into the experts of this part, or -1 for a replica of another part."""
        row = self.layers[layer]
        replicas = self._replicas(row)
        columns = min(lcm(*map(len, replicas)), MAX_COLUMNS)
        size = len(row) // self.parts
        chosen = [[own[column % len(own)] for column in range(columns)] for own in replicas]
        places = [[p % size if p // size == part else -1 for p in own] for own in chosen]
        return torch.tensor(places, dtype=torch.int32)

    def loads(self, counts: Tensor) -> Tensor:
        """Returns the pairs [layers, parts] float64 that each part computes. counts [layers, experts] int64: the pairs of
        each expert, of which its replicas have equal shares."""
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
    """Returns the placement of the experts in order, with `redundant` replicas of the first ones after them. Raises
    ModelError."""
    row = tuple(physical % experts for physical in range(experts + redundant))
    return Placement((row,) * layers, experts, parts)


def balancedness(loads: Tensor) -> float:
    """Returns a layer's mean load divided by its largest load, averaged over the layers that have any load; 0 if none
    has. loads [layers, parts]."""
    busy = loads[loads.sum(dim=1) > 0]
    return float((busy.mean(dim=1) / busy.amax(dim=1)).mean()) if len(busy) else 0.0
