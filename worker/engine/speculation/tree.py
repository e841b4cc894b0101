"""Trees of drafts by one layer after the model (EAGLE-2, arXiv:2406.16858).

After the sampling of a step, the layer runs over all its rows (`extension.py`), and the accepted nodes are moved to
the pages of their slots. Then a tree grows from the last token of each slot: in each depth the layer runs over the best
nodes of the depth before (`kernels/sampling/tree_growth.py`). Their keys and values lie after the pages of all
requests, as do the keys and values of the nodes that the next step verifies, and are not kept.

The children of a node are the tokens of the largest scores with the noise of the token that they stand for
(`kernels/sampling/top_scores.py`). The first one is the draft of a chain.
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
from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.kv_cache.move_rows import Layers, move_rows
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.kernels.sampling.tree_choice import choose_nodes
from mla_router.worker.kernels.sampling.tree_growth import Candidates, Roots, grow_tree
from mla_router.worker.kv_cache.spec import KVCacheSpec
from mla_router.worker.step.plan import Admitted
from mla_router.worker.tree_shape import TreeShape


@dataclass(frozen=True, slots=True)
class NewTree:
    """Implements `NewDrafter`."""

    layer: DraftLayer
    shape: TreeShape
    reads_rows: bool = True

    def kv_cache_specs(self, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
        return self.layer.kv_cache_specs(dtype)[:1]

    def __call__(
        self, forward_pass: ForwardPass, caches: Sequence[Tensor], draws: NewDraws
    ) -> Tree:
        return Tree(self.layer, self.shape, forward_pass, caches, draws)


class Tree:
    """Implements `Drafter`."""

    follows_all_steps = False

    def __init__(
        self,
        layer: DraftLayer,
        shape: TreeShape,
        forward_pass: ForwardPass,
        caches: Sequence[Tensor],
        draws: NewDraws,
    ) -> None:
        assert forward_pass.slots.tree is not None, f"{forward_pass.capacity}"
        self._extend = Extension(layer, forward_pass, caches)
        self._shape = shape
        self._forward = forward_pass
        self._state = forward_pass.slots.tree
        self._layers = Layers.of(forward_pass.caches)
        self._draws = draws
        self._draft_slots = SlotDrafts("draft tree", self._grow, shape.depth, forward_pass)

    def admit(self, requests: Sequence[Admitted]) -> None:
        del requests  # it reads their tokens in the rows of their steps

    def draft(self, step: DraftStep) -> None:
        plan, group = step.plan, step.plan.group
        hidden_states = self._extend(step) if plan.runs_drafter else None
        if step.sampled.path is not None:
            self._move(step.forward.slots, step.sampled.path, len(plan.decode_slots))
        # Other DP ranks need this one for the experts of the nodes that are expanded
        is_needed = group is not None and group.draft_slots and self._shape.depth > 1
        if hidden_states is not None and (plan.draft_slots or is_needed):
            self._draft_slots(step, hidden_states)

    def capture(self, decode_graphs: Sequence[DecodeGraph], sizes: Sequence[int]) -> None:
        self._extend.capture(decode_graphs)
        self._draft_slots.capture(sizes)

    def launch(self, rows: LookedUp, hidden_states: Tensor, queries: int) -> None:
        batch = self._forward.decode_batch(rows, queries)
        slots = len(rows.slots) // queries
        last = self._extend.run(batch, hidden_states, rows.tokens)[:slots]
        self._draft_slots.launch_idle(last)

    def _move(self, slots: Tensor, path: Tensor, decodes: int) -> None:
        """Moves the accepted nodes of the first `decodes` slots."""
        state = self._forward.slots
        move_rows(
            self._layers,
            path[:decodes],
            slots[:decodes],
            state.lengths,
            state.page_table,
            first_row=self._state.first_row,
            nodes=self._shape.nodes,
        )

    def _grow(self, slots_and_bounds: Tensor, hidden_states: Tensor, longest: int | None) -> None:
        """Implements `WriteDrafts`."""
        state, model, shape = self._forward.slots, self._forward.model, self._shape
        slots, bounds = slots_and_bounds.unbind()
        roots = Roots(slots, bounds, state.lengths, self._state.first_row, shape)
        candidates = Candidates.empty(len(slots), shape, slots.device)
        known = state.lengths[slots]
        draws, beam = self._draws(slots, known), None
        for depth in range(1, shape.depth + 1):
            if beam is not None:
                tail = TreeTail(beam.visible, shape.topk, shape.expanded, roots.first_row)
                batch = self._forward.decode_batch(beam.rows, shape.topk, longest, tail)
                above = hidden_states.index_select(0, beam.parents)
                hidden_states = self._extend.run(batch, above, beam.rows.tokens)
            best = draws.best(model.logits(hidden_states), shape.topk)
            beam = grow_tree(candidates, beam, *best, depth, roots)
            if depth == 1:
                draws = self._draws(beam.rows.slots, (known + 1).repeat_interleave(shape.topk))
        choose_nodes(candidates, slots, state.drafts, self._state.trees)
