"""A placement of experts by their load, so that ranks compute about equally many pairs.

The method is that of DeepSeek's expert parallelism load balancer (EPLB; DeepSeek-V3, arXiv:2412.19437, section 3.4),
without its hierarchy of nodes. The expert with the largest load a replica gets one more, until there are enough replicas.
Then replicas are packed, the largest first, each on the rank with the least load that has room (longest processing time
first: Graham, 1969).
"""

from __future__ import annotations

from collections.abc import Sequence

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.parallel.placement import Placement


def balanced(counts: Sequence[Sequence[float]], parts: int, redundant: int = 0) -> Placement:
    """Returns the placement on `parts` ranks. counts [layers][experts]: the pairs of each expert. `redundant`: replicas
    in each layer, beside one of each expert. Equal arguments give equal placements. Raises ModelError."""
    experts = len(counts[0])
    if (experts + redundant) % parts:
        raise ModelError(
            f"{experts} experts and {redundant} replicas cannot be divided into {parts} equal parts: change --ep-size or "
            f"--ep-num-redundant-experts"
        )
    if redundant > experts * (parts - 1):
        raise ModelError(
            f"--ep-num-redundant-experts {redundant}: at most {experts * (parts - 1)}, so that {parts} ranks have no "
            f"expert twice"
        )
    layers = (tuple(_packed(row, parts, redundant)) for row in counts)
    return Placement(tuple(layers), experts, parts)


def _packed(loads: Sequence[float], parts: int, redundant: int) -> list[int]:
    """Returns the experts of one layer's physical experts, one part after the other."""
    replicas = [1] * len(loads)
    for _ in range(redundant):
        free = (expert for expert, count in enumerate(replicas) if count < parts)
        replicas[max(free, key=lambda expert: (loads[expert] / replicas[expert], -expert))] += 1
    size = sum(replicas) // parts
    share = [load / count for load, count in zip(loads, replicas, strict=True)]
    packs: list[list[int]] = [[] for _ in range(parts)]

    def load(pack: list[int]) -> float:
        return sum(share[expert] for expert in pack)

    for expert in sorted(range(len(loads)), key=lambda expert: (-share[expert], expert)):
        for _ in range(replicas[expert]):
            room = [pack for pack in packs if len(pack) < size]
            without = [pack for pack in room if expert not in pack]
            if without:
                min(without, key=lambda pack: (load(pack), len(pack))).append(expert)
            else:
                _exchange(expert, room[0], packs, share)
    return [expert for pack in packs for expert in sorted(pack)]


def _exchange(expert: int, room: list[int], packs: list[list[int]], share: list[float]) -> None:
    """Puts `expert` into a full pack without it, and moves the expert of that pack with the most similar load into
    `room`, which has `expert` already. There are such packs, as an expert has at most one replica for each; and such
    experts, as a full pack has more experts than `room`."""
    pack, other = min(
        (
            (pack, other)
            for pack in packs
            if expert not in pack
            for other in pack
            if other not in room
        ),
        key=lambda found: abs(share[found[1]] - share[expert]),
    )
    pack[pack.index(other)] = expert
    room.append(other)
