"""State of the forward pass on the device between steps, indexed by request slot.

A step writes its sampled tokens here and the next step reads them, so that the host can launch step N+1 before it knows
the tokens of step N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.core import Capacity
from mla_router.worker.engine.runners.choose import MAX_INPUT_TOKENS
from mla_router.worker.kernels.kv_cache.out_cache_loc import (
    LookedUp,
    compute_out_cache_loc,
    look_up,
    prompt_out_cache_loc,
)


class SlotState:
    """Last token and page table of each slot. Only launched work writes them, in stream order.

    The last slot is the idle slot, beyond those of the capacity. Its pages are all page 0.
    """

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        slots, pages = capacity.num_slots + 1, capacity.pages_per_request
        self._page_size = capacity.page_size
        self.idle_slot = capacity.num_slots
        # The last token of each slot, then the chunks' tokens of a step of decode rows (`runners/decode_rows.py`)
        self.input_tokens = torch.zeros(slots + MAX_INPUT_TOKENS, dtype=torch.int64, device=device)
        self.last_token = self.input_tokens[:slots]
        self.page_table = torch.zeros(slots, pages, dtype=torch.int32, device=device)
        self._entries = self.page_table.view(-1)

    def write_pages(self, entries: Tensor, pages: Tensor) -> None:
        """Writes `pages` [W] int32 to `entries` [W] int64, indices into the flattened page table."""
        if len(pages):
            self._entries.scatter_(0, entries, pages)

    def write_input_tokens(self, tokens: Tensor) -> None:
        """Writes `tokens` [G] int64, at most MAX_INPUT_TOKENS, after the last tokens of the slots."""
        if len(tokens):
            self.input_tokens[len(self.last_token) :][: len(tokens)] = tokens

    def read_last_tokens(self, rows: Tensor, decodes: int) -> None:
        """Writes the last tokens of the first `decodes` rows into `rows` [3, T] int64: tokens, slots, positions."""
        if decodes:
            tokens, slots, _ = rows[:, :decodes].unbind()
            torch.index_select(self.last_token, 0, slots, out=tokens)

    def idle_rows(self, size: int) -> Tensor:
        """Returns [3, size] int64 for `look_up`: decode rows of the idle slot, of length 1."""
        rows = torch.full(
            (3, size), self.idle_slot, dtype=torch.int64, device=self.page_table.device
        )
        rows[1] = 1
        return rows

    def locations(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Returns the out_cache_loc [T] int64 of `slots` and `positions` [T] int64."""
        return compute_out_cache_loc(self.page_table, slots, positions, page_size=self._page_size)

    def prompt_out_cache_loc(self, prompt: Tensor, rows: int) -> Tensor:
        """Returns the out_cache_loc [rows] int64 of a prompt with slot and length `prompt` [2] int64."""
        return prompt_out_cache_loc(self.page_table, prompt, rows, page_size=self._page_size)

    def look_up(self, rows: Tensor, into: LookedUp | None = None) -> LookedUp:
        """Looks up the state of decode rows. `rows` [3, B] int64: slots, lengths, indices in `input_tokens`."""
        return look_up(
            rows, self.input_tokens, self.page_table, page_size=self._page_size, into=into
        )
