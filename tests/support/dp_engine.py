"""Steps of several DP ranks, launched together by the processes of `support.ranks`."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from mla_router.worker.engine.runners.choose import fits_decode_graph
from mla_router.worker.kernels.comm.all_to_all import Choice, ExpertTables
from mla_router.worker.kernels.comm.connect import Meeting
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.comm.groups import Groups
from mla_router.worker.model.moe import Gate
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import GroupStep, StepPlan
from mla_router.worker.step.result import StepResult
from support.fake_graphs import fake_decode_graphs
from support.fake_piecewise import fake_piecewise_graphs
from support.rank_engine import CPU, Step, engine_of_rank

DRAFT_SIZES = 2, 4, 8  # slots for which drafters have graphs
IDLE = Step(StepPlan((), (), (), (), ()), None)


class Division(NamedTuple):
    """Ranks in DP ranks, and the parts of the experts. `all_to_all`: see `Groups`."""

    size: int
    dp_size: int
    expert_parts: int = 1
    all_to_all: bool = False


class Case(NamedTuple):
    folder: Path
    capacity: Capacity
    decode_sizes: Sequence[int] = ()  # of decode graphs
    verify_sizes: Sequence[int] = ()
    piecewise_sizes: Sequence[int] = ()


class Outcome(NamedTuple):
    """The results of one rank, and the rows that its gates have seen."""

    results: list[StepResult]  # of the steps in which it has rows
    idle_rows: int  # that gates have seen
    routed_idle_rows: int  # of these, the ones with an expert
    piecewise_steps: int


def together(of_ranks: Sequence[Sequence[Step]], seed: int) -> list[list[Step]]:
    """Returns the steps that DP ranks launch together, by rank: those of `of_ranks` in order, and idle steps. For some steps
    a rank is busy, idle, or both in turn."""
    rng = random.Random(seed)
    waiting = [deque(steps) for steps in of_ranks]
    joined: list[list[Step]] = [[] for _ in of_ranks]
    chances = [1.0] * len(waiting)
    while any(waiting):
        if rng.random() < 0.15:
            chances = [rng.choice((0.0, 0.5, 1.0, 1.0)) for _ in waiting]
        busy = [bool(steps) and rng.random() < chances[i] for i, steps in enumerate(waiting)]
        if not any(busy):
            chances = [1.0] * len(waiting)
            continue
        steps = [own.popleft() if takes else IDLE for own, takes in zip(waiting, busy, strict=True)]
        group = GroupStep(
            tuple(step.plan.num_tokens for step in steps),
            all(fits_decode_graph(step.plan) for step in steps),
            any(step.plan.feeds_drafter for step in steps),
            max(step.plan.draft_slots for step in steps),
        )
        for own, step in zip(joined, steps, strict=True):
            own.append(step._replace(plan=replace(step.plan, group=group)))
    return joined


class IdleRows:
    """Counts the idle rows that gates see."""

    def __init__(self, *, of_own: bool) -> None:
        """`of_own`: gates choose for the rows of their own rank alone."""
        self.seen = 0
        self.routed = 0  # rows with an expert
        self._of_own = of_own

    def watch(self, gate: Gate) -> None:
        gate.register_forward_hook(self._chosen_for_all)
        gate.choose_of_own = partial(self._choose_of_own, gate)  # type: ignore[method-assign]

    def _chosen_for_all(self, _: Gate, rows: tuple[Tensor, Tensor | None], chosen: Choice) -> None:
        assert not self._of_own, "a gate chose for other ranks"
        self._count(rows, chosen)

    def _choose_of_own(self, gate: Gate, *rows: Any) -> tuple[Choice, ExpertTables]:
        choice, tables = Gate.choose_of_own(gate, *rows)
        self._count(rows, choice)
        return choice, tables

    def _count(self, rows: tuple[Tensor, Tensor | None], chosen: Choice) -> None:
        locations, ids = rows[1], chosen[1]
        if locations is not None:
            assert len(locations) == len(ids) == len(rows[0]), "not a location for each row"
            of_idle = ids[locations == 0]
            self.seen += len(of_idle)
            self.routed += int((of_idle >= 0).sum())


def repeat(
    group: Group,
    folder: Path,
    division: Division,
    case: Case,
    of_ranks: Sequence[Sequence[Step]],
) -> Outcome:
    """Runs the steps of this process's DP rank. `folder`: of the files in which the ranks meet."""
    groups = _groups(group, division.dp_size, division.all_to_all, folder)
    engine = engine_of_rank(
        groups,
        case.folder,
        case.capacity,
        device=_device(group),
        expert_parts=division.expert_parts,
    )
    idle = IdleRows(of_own=division.all_to_all)
    if case.decode_sizes:
        fake_decode_graphs(
            engine,
            case.decode_sizes,
            pytest.MonkeyPatch(),
            case.verify_sizes,
            case.verify_sizes and DRAFT_SIZES,
        )
    piecewise = fake_piecewise_graphs(engine, case.piecewise_sizes)
    for module in engine.model.modules():
        if isinstance(module, Gate):
            idle.watch(module)
    results = []
    for plan, masks in of_ranks[groups.exchange.rank]:
        result = engine.sample(engine.forward(plan), masks).wait()
        if plan.num_tokens:
            results.append(result)
        else:
            assert not result.tokens, f"tokens of an idle rank: {result}"
    return Outcome(results, idle.seen, idle.routed, sum(graph.replays for graph in piecewise))


@cache
def _groups(group: Group, dp_size: int, all_to_all: bool, folder: Path) -> Groups:
    store = FileStore(str(folder / f"dp{dp_size}-{all_to_all}"), -1)
    meeting = Meeting(store, _device(group))
    return Groups.join(group.rank, group.size, meeting, dp_size=dp_size, all_to_all=all_to_all)


def _device(group: Group) -> torch.device:
    return torch.device("cuda", group.rank) if group.backend == "nccl" else CPU
