"""The interface of drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mla_router.worker.engine.runners.decode_graph import DecodeGraph
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.runners.outputs import ForwardOutput
from mla_router.worker.engine.sampling.draws import Draws
from mla_router.worker.engine.sampling.sampler import Sampled
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.kv_cache.spec import KVCacheSpec
from mla_router.worker.step.plan import Admitted, StepPlan


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A sampled step: T rows with padding, of which R are sampled, for S slots."""

    forward: ForwardOutput  # with the hidden states of all T rows
    sampled: Sampled
    tokens: Tensor  # [R] int64, the tokens of the sampled rows

    @property
    def plan(self) -> StepPlan:
        return self.forward.plan

    @property
    def last_rows(self) -> Tensor:
        """[S] int64, of the T rows the one with the last token of each slot."""
        rows, last, slots = self.forward.rows, self.sampled.last, self.forward.slots
        if last is None:
            return torch.arange(len(slots), device=slots.device) if rows is None else rows
        return last if rows is None else rows.index_select(0, last)


class Drafter(Protocol):
    """Drafts the tokens after the sampled ones of a step."""

    @property
    def follows_all_steps(self) -> bool:
        """Whether `draft` runs after all steps, also of plans that make no drafts."""
        ...

    def admit(self, requests: Sequence[Admitted]) -> None:
        """Takes one or more requests that take a slot."""
        ...

    def capture(self, decode_graphs: Sequence[DecodeGraph], sizes: Sequence[int]) -> None:
        """Replaces all captured graphs by graphs for the steps of each of `decode_graphs`, and for `sizes` slots."""
        ...

    def launch(self, rows: LookedUp, hidden_states: Tensor, queries: int) -> None:
        """Launches the kernels that draft after `ForwardPass.decode` of `rows`, for as many slots."""
        ...

    def draft(self, step: DraftStep) -> None:
        """Writes the drafts of the step's slots to `SlotState.drafts`, if its plan has `draft_bounds`. Called after the
        sampling of each step whose plan `runs_drafter`, and of each step that verifies trees, whose accepted nodes it
        moves to their slots' pages. If it `follows_all_steps`, of all steps. Does not wait for the device."""
        ...


# Returns the draws of rows of slots [R], from positions [R] int32 on.
NewDraws = Callable[[Tensor, Tensor], Draws]


class NewDrafter(Protocol):
    """Builds the drafter of an engine."""

    @property
    def reads_rows(self) -> bool:
        """Whether it needs the hidden states of all rows of a step, and their batch."""
        ...

    def kv_cache_specs(self, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
        """Returns the rows of the drafter's layers in a KV cache of `dtype`. They are on the pages of the model's."""
        ...

    def __call__(
        self, forward_pass: ForwardPass, caches: Sequence[Tensor], draws: NewDraws
    ) -> Drafter:
        """`caches`: the KV caches of these layers."""
        ...
