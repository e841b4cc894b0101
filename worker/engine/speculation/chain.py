"""Drafts by one layer after the model: its own for multi-token prediction (NextN), or an EAGLE head.

The layer is applied repeatedly, so the drafts of a slot are a chain. It runs over all rows of a step, each with the
token that follows it, and then over one row a slot for each further draft, where its own results take the place of the
model's. It keeps keys and values on the pages of the model's layers. A draft is drawn with the noise of the token that
it stands for, so both agree more often than two independent draws (arXiv:2408.07978).

Rows after the accepted ones are wrong, and are overwritten before a later row attends to them. Some rows that stay are
of a token that did not follow: the last row of a chunk before the next one, and the last row of a cached prefix
whose next token differs. They cost some acceptance, and change no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_router.worker.engine.runners.decode_graph import DecodeGraph
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.speculation.drafter import DraftStep, NewDraws
from mla_router.worker.engine.speculation.extension import DraftLayer, Extension
from mla_router.worker.engine.speculation.slot_drafts import SlotDrafts
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp, look_up
from mla_router.worker.kv_cache.spec import KVCacheSpec
from mla_router.worker.step.plan import Admitted, RowKind


@dataclass(frozen=True, slots=True)
class NewChain:
    """Implements `NewDrafter`."""

    layer: DraftLayer
    num_drafts: int
    reads_rows: bool = True

    def kv_cache_specs(self, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
        return self.layer.kv_cache_specs(dtype)[:1]

    def __call__(
        self, forward_pass: ForwardPass, caches: Sequence[Tensor], draws: NewDraws
    ) -> Chain:
        return Chain(self.layer, self.num_drafts, forward_pass, caches, draws)


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
        self._draft_slots = SlotDrafts("draft chain", self._chain, 2 * num_drafts, forward_pass)

    def admit(self, requests: Sequence[Admitted]) -> None:
        del requests  # it reads their tokens in the rows of their steps

    def draft(self, step: DraftStep) -> None:
        hidden_states, group = self._extend(step), step.plan.group
        # Other DP ranks need this one for the experts of the rows after the first draft
        is_needed = group is not None and group.draft_slots and self._num_drafts > 1
        if step.plan.draft_slots or is_needed:
            self._draft_slots(step, hidden_states)

    def capture(self, decode_graphs: Sequence[DecodeGraph], sizes: Sequence[int]) -> None:
        self._extend.capture(decode_graphs)
        self._draft_slots.capture(sizes)

    def launch(self, rows: LookedUp, hidden_states: Tensor, queries: int) -> None:
        batch = self._forward.decode_batch(rows, queries)
        self._draft_slots.launch_idle(self._extend.run(batch, hidden_states, rows.tokens))

    def _chain(self, slots_and_bounds: Tensor, hidden_states: Tensor, longest: int | None) -> None:
        """Implements `WriteDrafts`."""
        state, model = self._forward.slots, self._forward.model
        slots, bounds = slots_and_bounds.unbind()
        draws = self._draws(slots, state.lengths[slots])
        # The row that makes a draft has the position of the token before it: one less than as a draft
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
