"""State of the forward pass on the device between steps, indexed by request slot.

A step writes its sampled tokens, the new lengths and drafts here and the next step reads them, so that the host can
launch step N+1 before it knows the tokens of step N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.engine.sampling.drafted_rows import SlotTokens
from mla_router.worker.engine.speculation.tree_state import TreeState
from mla_router.worker.kernels.kv_cache.out_cache_loc import (
    LookedUp,
    look_up,
    prompt_out_cache_loc,
    window_cache_loc,
)
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import RowKind, StepPlan


class SlotState:
    """Last token, drafts, length and page table of each slot. Only launched work writes them, in stream order.

    The last slot is the idle slot, beyond those of the capacity. Its pages are all page 0.
    """

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        assert capacity.window is None or not capacity.num_drafts, f"{capacity}"
        # Attention of drafts may read beyond the longest request, if their rows are idle
        own = -(-capacity.longest_row // capacity.page_size)
        slots, pages = capacity.num_slots + 1, own * capacity.page_kinds
        self._page_size = capacity.page_size
        self._pages_per_slot = pages
        self._lengths_at = slots * pages
        self.idle_slot = capacity.num_slots
        self.last_token = torch.zeros(slots, dtype=torch.int64, device=device)
        self._with_drafts = capacity.num_drafts > 0
        # [slots, max drafts]: drafts of the tokens after the last one, or of the nodes of `tree` after the root
        drafts = max(1, capacity.rows_per_decode - 1)
        self.drafts = torch.zeros(slots, drafts, dtype=torch.int64, device=device)
        self.tree = None if capacity.tree is None else TreeState(capacity, device)
        # Page table and lengths are one tensor, so that one launch writes both
        self._numbers = torch.zeros(slots * (pages + 1), dtype=torch.int32, device=device)
        tables = self._numbers[: self._lengths_at].view(slots, pages)
        self.page_table = tables[:, :own]
        # The page table of window layers that have pages of their own; None: there are none
        self.window_page_table = None if capacity.window is None else tables[:, own:]
        # [slots] int32, tokens of the request with the last sampled one, whose row in the KV cache the next step writes.
        # At least 1, so that a decode row always has a position
        self.lengths = self._numbers[self._lengths_at :].fill_(1)

    @property
    def tokens(self) -> SlotTokens:
        """The tokens that sampling reads and writes."""
        trees = None if self.tree is None else self.tree.trees
        return SlotTokens(self.lengths, self.last_token, self.drafts, trees)

    def writes(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Returns the writes of `plan` for `write`, as entries and values: its new pages, and the lengths of the slots
        whose last chunk it computes."""
        pages = self._pages_per_slot
        entries = [slot * pages + index for slot, index, _ in plan.page_writes]
        values = [page for _, _, page in plan.page_writes]
        for chunk in plan.chunks:
            if chunk.is_last:
                entries.append(self._lengths_at + chunk.slot)
                values.append(chunk.start + len(chunk.tokens))
        return entries, values

    def write(self, entries: Tensor, values: Tensor) -> None:
        """Writes `values` [W] int32 to `entries` [W] int64, the indices of `writes`."""
        if len(values):
            self._numbers.scatter_(0, entries, values)

    def prompt_out_cache_loc(self, prompt: Tensor, rows: int) -> Tensor:
        """Returns the out_cache_loc [rows] int64 of a prompt with slot and length `prompt` [2] int64."""
        return prompt_out_cache_loc(self.page_table, prompt, rows, page_size=self._page_size)

    def look_up(
        self, rows: Tensor, kinds: Tensor, into: LookedUp | None = None, queries: int = 1
    ) -> LookedUp:
        """Looks up the inputs of `rows` [3, B] int64, slots, lengths and tokens, of `kinds` [B] int8. The first ones
        may be rows of decode slots, `queries` of each."""
        found = look_up(
            rows,
            kinds,
            self.last_token,
            self.drafts,
            self.lengths,
            self.page_table,
            page_size=self._page_size,
            into=into,
        )
        if self.tree is not None and queries > 1:
            state = self.last_token, self.drafts, self.lengths
            self.tree.look_up(rows, kinds, *state, found)
        return found

    def chains(self, slots: Tensor) -> Tensor:
        """Returns the drafts of `slots` [S] int64, [S, K] int64: of a tree the chain of its best nodes, with UNUSED
        after it."""
        drafts = self.drafts[slots]
        return drafts if self.tree is None else self.tree.chains(slots, drafts)

    def window_cache_loc(self, rows: LookedUp) -> Tensor | None:
        """Returns the out_cache_loc of `rows` in layers that have window pages; None without such layers."""
        if self.window_page_table is None:
            return None
        return window_cache_loc(self.window_page_table, rows, page_size=self._page_size)

    def prompt_window_cache_loc(self, prompt: Tensor, rows: int) -> Tensor | None:
        """Returns `prompt_out_cache_loc` in layers that have window pages; None without such layers."""
        if self.window_page_table is None:
            return None
        return prompt_out_cache_loc(self.window_page_table, prompt, rows, page_size=self._page_size)

    def idle_rows(self, size: int) -> LookedUp:
        """Looks up `size` idle rows, of token 0."""
        device = self.page_table.device
        rows = torch.zeros(3, size, dtype=torch.int64, device=device)
        rows[0] = self.idle_slot
        kinds = torch.full((size,), int(RowKind.IDLE), dtype=torch.int8, device=device)
        return self.look_up(rows, kinds)

    def check(self, plan: StepPlan) -> None:
        """Asserts that the tokens of the decode rows of `plan`, which is not sampled yet, are as many as the plan says,
        or with drafts at most as many. Waits for the device."""
        lengths = self.lengths.tolist()
        known = tuple([lengths[slot] for slot in plan.decode_slots])
        if self._with_drafts:
            pairs = zip(known, plan.decode_bounds, strict=True)
            assert all(length <= bound for length, bound in pairs), f"{known} tokens, {plan}"
        else:
            assert known == plan.decode_bounds, f"{known} tokens, {plan}"
