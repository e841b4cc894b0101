"""Drafts by one layer behind the model: its own for multi-token prediction (NextN), or an EAGLE head.

The layer is applied repeatedly, so the drafts of a slot are a chain. It runs over all rows of a step, each with the token that follows it, and then over
one row a slot for each further draft, where its own results take the place of the model's. It keeps keys and values on the
pages of the model's layers. A draft is drawn with the noise of the token that it stands for, so both agree more often than
two independent draws (arXiv:2408.07978).

Rows behind the accepted ones are wrong, and are overwritten before a later row attends to them. Some rows that stay are of
a token that did not follow: the last row of a chunk in front of the next one, and the last row of a cached prefix whose
next token differs. They cost some acceptance, and change no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.core import Admitted, RowKind
from mla_router.worker.engine.runners.capture import capture_sizes
from mla_router.worker.engine.runners.choose import smallest
from mla_router.worker.engine.runners.decode_graph import DecodeGraph
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.speculation.drafter import DraftStep, NewDraws
from mla_router.worker.engine.speculation.extension import DraftLayer, Extension
from mla_router.worker.engine.upload import Upload
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp, look_up
from mla_router.worker.kv_cache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class NewChain:
    """Implements `NewDrafter`."""

    layer: DraftLayer
    num_drafts: int
    reads_hidden_states: bool = True

    def kv_cache_specs(self, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
        return self.layer.kv_cache_specs(dtype)[:1]

    def __call__(
        self, forward_pass: ForwardPass, caches: Sequence[Tensor], draws: NewDraws
    ) -> Chain:
        return Chain(self.layer, self.num_drafts, forward_pass, caches, draws)


@dataclass(frozen=True, slots=True)
class ChainGraph:
    """The captured drafts of a number of slots."""

    graph: torch.cuda.CUDAGraph
    slots_and_bounds: Tensor  # [2, size] int64, input
    hidden_states: Tensor  # [size, hidden_size], input

    def replay(self, slots_and_bounds: Tensor, hidden_states: Tensor, rows: Tensor) -> None:
        """Drafts from `rows` [at most size] int64 of `hidden_states` [T, hidden_size]."""
        self.slots_and_bounds.copy_(slots_and_bounds)
        torch.index_select(hidden_states, 0, rows, out=self.hidden_states[: len(rows)])
        self.graph.replay()


class Chain:
    """Implements `Drafter`."""

    follows_all_steps = False

    def __init__(
        self,
        layer: DraftLayer,
        num_drafts: int,
        forward_pass: ForwardPass,
        caches: Sequence[Tensor],
        draws: NewDraws,
    ) -> None:
        self._extend = Extension(layer, forward_pass, caches)
        self._num_drafts = num_drafts
        self._forward = forward_pass
        self._draws = draws
        self._upload = Upload(forward_pass.device)
        self._chain_graphs: dict[int, ChainGraph] = {}  # by slots
        self._chain_sizes: Sequence[int] = ()  # of them, ascending

    def admit(self, requests: Sequence[Admitted]) -> None:
        del requests  # it reads their tokens in the rows of their steps

    def draft(self, step: DraftStep) -> None:
        hidden_states = self._extend(step)
        plan, count = step.plan, len(step.slots)
        if not any(plan.draft_bounds):
            return  # no request takes drafts
        size = smallest(self._chain_sizes, count) or count
        spare = size - count
        slots = [*plan.sampled_slots, *[self._forward.slots.idle_slot] * spare]
        (numbers,) = self._upload.integers("q", [*slots, *plan.draft_bounds, *[0] * spare])
        slots_and_bounds = numbers.view(2, size)
        if size in self._chain_graphs:
            self._chain_graphs[size].replay(slots_and_bounds, hidden_states, step.last_rows)
        else:
            last = hidden_states.index_select(0, step.last_rows)
            ends = (chunk.start + len(chunk.tokens) for chunk in plan.chunks)
            longest = max((*plan.decode_bounds, *ends)) + 2 * self._num_drafts
            self._chain(slots_and_bounds, last, min(longest, self._forward.capacity.longest_row))

    def capture(self, decode_graphs: Sequence[DecodeGraph], sizes: Sequence[int]) -> None:
        self._extend.capture(decode_graphs)
        self._chain_graphs = capture_sizes(
            "draft chain", self._capture_chain, sizes, self._forward.device
        )
        self._chain_sizes = sizes

    def launch(self, rows: LookedUp, hidden_states: Tensor, queries: int) -> None:
        batch = self._forward.decode_batch(rows, queries)
        self._chain(
            self._idle(len(rows.slots)), self._extend.run(batch, hidden_states, rows.tokens), None
        )

    def _idle(self, size: int) -> Tensor:
        """Returns idle slots and their bounds, [2, size] int64."""
        idle = torch.zeros(2, size, dtype=torch.int64, device=self._forward.device)
        idle[0] = self._forward.slots.idle_slot
        return idle

    def _capture_chain(self, size: int, pool: Any) -> ChainGraph:
        slots_and_bounds, device = self._idle(size), self._forward.device
        like = self._forward.model.head.values
        width = self._forward.model.config.hidden_size
        states = torch.zeros(size, width, dtype=like.dtype, device=device)
        self._chain(slots_and_bounds, states, None)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._chain(slots_and_bounds, states, None)
        return ChainGraph(graph, slots_and_bounds, states)

    def _chain(self, slots_and_bounds: Tensor, hidden_states: Tensor, longest: int | None) -> None:
        """Writes the drafts of S slots. `slots_and_bounds` [2, S] int64: the slots, and `StepPlan.draft_bounds`.
        `hidden_states` [S, hidden_size]: of the row with the last token of each slot. `longest`: most tokens of a row, by
        default as many as a row may have."""
        state, model = self._forward.slots, self._forward.model
        slots, bounds = slots_and_bounds.unbind()
        draws = self._draws(slots, state.lengths[slots])
        # The row that makes a draft has the position of the token in front of it: one less than as a draft
        lengths = state.lengths - 1
        kinds = torch.full_like(slots, int(RowKind.DRAFT), dtype=torch.int8)
        for rank in range(self._num_drafts):
            draws.draw(model.logits(hidden_states))
            state.drafts[:, rank].index_copy_(0, slots, draws.tokens)
            if rank == self._num_drafts - 1:
                return
            rows = look_up(
                torch.stack((slots, bounds, torch.full_like(slots, rank + 1))),
                kinds,
                state.last_token,
                state.drafts,
                lengths,
                state.page_table,
                page_size=self._forward.capacity.page_size,
            )
            batch = self._forward.decode_batch(rows, longest=longest)
            hidden_states = self._extend.run(batch, hidden_states, rows.tokens)
