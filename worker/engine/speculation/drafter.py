"""The interface of drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mla_router.worker.core import Admitted, StepPlan
from mla_router.worker.engine.runners.decode_graph import DecodeGraph
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.sampling.draws import Draws
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.kv_cache.spec import KVCacheSpec
from mla_router.worker.model.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A sampled step: T rows with padding, of which R are sampled, for S slots."""

    plan: StepPlan
    slots: Tensor  # [S] int64
    hidden_states: Tensor  # [T, hidden_size], the input of the head
    rows: Tensor | None  # [R] int64, the sampled rows; None: the first ones
    tokens: Tensor  # [R] int64, the tokens of the sampled rows
    # [S] int64, the sampled row with the last token of each slot; None: R == S, its own row
    last: Tensor | None
    path: Tensor | None  # with a tree: of each slot the accepted nodes, as of `accept_tree`
    source: ForwardBatch | DecodeGraph | None  # the T rows, or the graph of T rows that ran them

    @property
    def last_rows(self) -> Tensor:
        """[S] int64, of the T rows the one with the last token of each slot."""
        if self.last is None:
            return (
                torch.arange(len(self.slots), device=self.slots.device)
                if self.rows is None
                else self.rows
            )
        return self.last if self.rows is None else self.rows.index_select(0, self.last)


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
        """Writes the drafts of the step's slots to `SlotState.drafts`, if its plan `makes_drafts`. Runs after the
        sampling of each such step, and of each step that verifies trees, whose accepted nodes it moves to their slots'
        pages. If it `follows_all_steps`, of all steps. Does not wait for the device."""
        ...


# Returns the draws of rows of slots [R], from positions [R] int32 on.
NewDraws = Callable[[Tensor, Tensor], Draws]


class NewDrafter(Protocol):
    """Builds the drafter of an engine."""

    @property
    def reads_hidden_states(self) -> bool:
        """Whether it needs the hidden states of all rows of a step, and the attention of the step."""
        ...

    def kv_cache_specs(self, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
        """Returns the rows of the drafter's layers in a KV cache of `dtype`. They are on the pages of the model's."""
        ...

    def __call__(
        self, forward_pass: ForwardPass, caches: Sequence[Tensor], draws: NewDraws
    ) -> Drafter:
        """`caches`: the KV caches of these layers."""
        ...
