"""Launches the drafts after the last tokens of a step's slots, by a CUDA graph if one was captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mla_router.worker.engine.runners.capture import capture, capture_sizes
from mla_router.worker.engine.runners.choose import smallest
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.speculation.drafter import DraftStep
from mla_router.worker.engine.upload import Upload


class WriteDrafts(Protocol):
    def __call__(
        self, slots_and_bounds: Tensor, hidden_states: Tensor, longest: int | None
    ) -> None:
        """Writes the drafts of S slots. `slots_and_bounds` [2, S] int64: the slots, and `StepPlan.draft_bounds`.
        `hidden_states` [S, hidden_size]: of the row with the last token of each slot. `longest`: maximum length of a
        row, by default as many as a row may have."""
        ...


@dataclass(frozen=True, slots=True)
class SlotGraph:
    """The captured drafts of a number of slots."""

    graph: torch.cuda.CUDAGraph
    slots_and_bounds: Tensor  # [2, size] int64, input
    hidden_states: Tensor  # [size, hidden_size], input

    def replay(self, slots_and_bounds: Tensor, hidden_states: Tensor, rows: Tensor) -> None:
        """Drafts from `rows` [at most size] int64 of `hidden_states` [T, hidden_size]."""
        self.slots_and_bounds.copy_(slots_and_bounds)
        torch.index_select(hidden_states, 0, rows, out=self.hidden_states[: len(rows)])
        self.graph.replay()


class SlotDrafts:
    """Drafts for the slots of a step by `write`, in a CUDA graph if one was captured for their number."""

    def __init__(
        self, name: str, write: WriteDrafts, ahead: int, forward_pass: ForwardPass
    ) -> None:
        """`name`: of the graphs. `ahead`: maximum number of tokens of a draft's row beyond the bounds of the plan."""
        self._name = name
        self._write = write
        self._ahead = ahead
        self._forward = forward_pass
        self._upload = Upload(forward_pass.device)
        self._graphs: dict[int, SlotGraph] = {}  # by slots
        self._sizes: Sequence[int] = ()  # of them, ascending

    def __call__(self, step: DraftStep, hidden_states: Tensor) -> None:
        """Drafts for the slots of a step, if one or more take drafts, from `hidden_states` [T, hidden_size]. All DP ranks
        draft for the number of slots of the rank with the most: the further slots are idle."""
        plan, count = step.plan, step.plan.draft_slots
        largest = count if plan.group is None else plan.group.draft_slots
        size = smallest(self._sizes, largest) or largest
        spare = size - count
        slots = [*plan.sampled_slots[:count], *[self._forward.slots.idle_slot] * spare]
        bounds = [*plan.draft_bounds[:count], *[0] * spare]
        (numbers,) = self._upload.integers("q", [*slots, *bounds])
        slots_and_bounds, rows = numbers.view(2, size), step.last_rows[:count]
        if size in self._graphs:
            self._graphs[size].replay(slots_and_bounds, hidden_states, rows)
        else:
            last = hidden_states.new_zeros(size, hidden_states.shape[1])
            torch.index_select(hidden_states, 0, rows, out=last[:count])
            ends = (chunk.start + len(chunk.tokens) for chunk in plan.chunks)
            longest = max((*plan.decode_bounds, *ends), default=1) + self._ahead
            self._write(slots_and_bounds, last, min(longest, self._forward.capacity.longest_row))

    def capture(self, sizes: Sequence[int]) -> None:
        self._graphs = capture_sizes(self._name, self._capture_size, sizes)
        self._sizes = sizes

    def launch_idle(self, hidden_states: Tensor) -> None:
        """Launches the drafts of idle slots, one for each of `hidden_states` [S, hidden_size]."""
        self._write(self._idle(len(hidden_states)), hidden_states, None)

    def _idle(self, size: int) -> Tensor:
        """Returns idle slots and their bounds, [2, size] int64."""
        idle = torch.zeros(2, size, dtype=torch.int64, device=self._forward.device)
        idle[0] = self._forward.slots.idle_slot
        return idle

    def _capture_size(self, size: int, pool: Any) -> SlotGraph:
        slots_and_bounds, device = self._idle(size), self._forward.device
        like = self._forward.model.head.values
        width = self._forward.model.config.hidden_size
        states = torch.zeros(size, width, dtype=like.dtype, device=device)
        graph, _ = capture(partial(self._write, slots_and_bounds, states, None), pool, device)
        return SlotGraph(graph, slots_and_bounds, states)
