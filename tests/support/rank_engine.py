"""Steps of an engine: recorded with one rank, and repeated by the processes of `support.ranks`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.async_copy import AsyncCopy
from mla_router.worker.engine.capacity import capacity_without_pages, plan_capacity
from mla_router.worker.engine.runners.outputs import ForwardOutput
from mla_router.worker.engine.speculation.chain import DraftLayer, NewChain
from mla_router.worker.engine.speculation.drafter import NewDrafter
from mla_router.worker.engine.speculation.tree import NewTree
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.comm.groups import Groups
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.loader import load_eagle, load_model, load_mtp
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import StepPlan, TokenMasks
from mla_router.worker.step.result import StepResult
from support.attention import torch_attention
from support.checked_engine import CheckedEngine

CPU = torch.device("cpu")


class Step(NamedTuple):
    plan: StepPlan
    masks: TokenMasks | None


class RecordingEngine(CheckedEngine):
    """Keeps the steps and their results."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.steps: list[Step] = []
        self.pending: list[AsyncCopy] = []

    def sample(self, forward: ForwardOutput, masks: TokenMasks | None = None) -> AsyncCopy:
        self.steps.append(copy.deepcopy(Step(forward.plan, masks)))
        self.pending.append(super().sample(forward, masks))
        return self.pending[-1]

    def results(self) -> list[StepResult]:
        return [pending.wait() for pending in self.pending]


def engine_of_rank(
    groups: Groups,
    folder: Path,
    capacity: Capacity,
    *,
    device: torch.device = CPU,
    expert_parts: int = 1,
    eagle: Path | None = None,
    **how: Any,
) -> RecordingEngine:
    """Returns the engine of one rank. If `capacity` has drafts, they are of the model's own layer, or of the head in `eagle`.
    `how`: further arguments of `load_model`."""
    dtype = torch.float32
    model = load_model(
        folder, device=device, dtype=dtype, groups=groups, expert_parts=expert_parts, **how
    )
    new_drafter: NewDrafter | None = None
    if capacity.num_drafts:
        whole = read_config(folder)
        layer: DraftLayer = (
            load_mtp(model, folder, config=whole)
            if eagle is None
            else load_eagle(model, eagle, config=whole)
        )
        new_drafter = (
            NewChain(layer, capacity.num_drafts)
            if capacity.tree is None
            else NewTree(layer, capacity.tree)
        )
    return RecordingEngine(
        model,
        capacity,
        device=device,
        dtype=dtype,
        attention=torch_attention(model.config),
        new_drafter=new_drafter,
    )


def repeat(
    group: Group,
    folder: Path,
    capacity: Capacity,
    steps: Sequence[Step],
    expert_parts: int = 1,
    how: dict[str, Any] | None = None,
) -> list[StepResult]:
    """Returns the results of `steps` on this rank."""
    engine = engine_of_rank(
        Groups(group), folder, capacity, expert_parts=expert_parts, **(how or {})
    )
    for plan, masks in steps:
        engine.sample(engine.forward(plan), masks)
    return engine.results()


def pages_with(group: Group, tokens: Sequence[int]) -> int:
    """Returns the number of pages if each rank has room for a different number of tokens."""
    config = WorkerConfig(max_total_tokens=tokens[group.rank], page_size=16)
    specs = read_config(config.folder).kv_cache_specs(torch.float32)
    empty = capacity_without_pages(config, 128, None, CPU)
    return plan_capacity(config, empty, specs, CPU, group=group).num_pages
