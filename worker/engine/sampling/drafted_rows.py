"""The rows of a step that verifies drafts: a chain of each slot, or a tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_router.worker.engine.sampling.penalties import DraftsAhead
from mla_router.worker.engine.sampling.step_rows import DraftArrays
from mla_router.worker.kernels.kv_cache.tree_rows import Trees
from mla_router.worker.kernels.sampling.accept import accept
from mla_router.worker.kernels.sampling.accept_tree import accept_tree
from mla_router.worker.step.plan import StepPlan


@dataclass(frozen=True, slots=True)
class SlotTokens:
    """The tokens of each slot, on the device."""

    lengths: Tensor  # [slots] int32, of the tokens so far
    last_token: Tensor  # [slots] int64
    drafts: Tensor  # [slots, K] int64, after the last token: a chain, or the nodes of `trees` without their roots
    trees: Trees | None = None


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """R sampled rows. The first slots, D, have several, next to each other."""

    slots: Tensor  # [R] int64
    numbers: Tensor  # [R] int32, of the rows of a slot
    offsets: Tensor  # [R] int32, positions after the slot's last token
    positions: Tensor  # [R] int32, of the tokens that are drawn
    bounds: Tensor  # [D] int64, `StepPlan.decode_bounds`
    drafts: Tensor  # [all slots, K] int64
    trees: Trees | None  # None: the drafts are chains
    limits: Tensor | None = None  # with a tree: of the D slots (`accept_tree`)

    @classmethod
    def of(
        cls, plan: StepPlan, owners: Tensor, rows: DraftArrays, tokens: SlotTokens
    ) -> DraftedRows:
        """Returns the rows of `plan`, whose sampled slots are `owners` [S] int64."""
        slots, numbers, bounds, room = rows.slots, rows.numbers, rows.bounds, rows.room
        if not plan.tree_nodes:
            if room is not None:
                bounds = torch.minimum(bounds, tokens.lengths[owners[: len(bounds)]] + room - 1)
            positions = tokens.lengths[slots] + numbers
            chains = tokens.drafts[:, : plan.num_drafts]
            return cls(slots, numbers, numbers, positions, bounds, chains, None)
        assert tokens.trees is not None, f"no trees, {plan}"
        depths = tokens.trees.depths[slots, numbers].int()
        positions = tokens.lengths[slots] + depths
        # The first rows of a tree are the chain of its best nodes
        return cls(
            slots, numbers, depths, positions, bounds, tokens.drafts, tokens.trees, limits=room
        )

    def ahead(self, rows: Tensor) -> DraftsAhead:
        """Returns the drafts between each of `rows` [P] int64 and the last token of its slot."""
        slots = self.slots[rows]
        drafts = self.drafts[slots]
        if self.trees is None:
            return DraftsAhead.of(drafts, self.offsets[rows])
        bits = torch.arange(1, drafts.shape[1] + 1, device=rows.device)
        ancestors = self.trees.ancestors[slots, self.numbers[rows]]
        return DraftsAhead.among(drafts, (ancestors[:, None] >> bits) & 1 != 0)

    def accept(
        self, drawn: Tensor, owners: Tensor, tokens: SlotTokens, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Accepts drafts by the tokens `drawn` [R] int32, for the slots `owners` [S] int64. Returns the row of the last
        token of each, [S] int64, and of trees the accepted nodes (`accept_tree`). Writes the rest as `accept` does."""
        lengths, last_token = tokens.lengths, tokens.last_token
        last = torch.empty_like(owners)
        if self.trees is None:
            accept(drawn, owners, self.bounds, self.drafts, lengths, last_token, out, last)
            return last, None
        path = owners.new_empty(out.shape)
        accept_tree(
            drawn,
            owners,
            self.bounds,
            self.drafts,
            self.trees.parents,
            lengths,
            last_token,
            out,
            last,
            path,
            self.limits,
        )
        return last, path
