"""Biases of single logits: logit_bias, and -inf for stop tokens before min_tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.engine.upload import Upload
from mla_router.worker.step.plan import Admitted

FOR_EVER = 1 << 62  # a position after all others


class LogitBias:
    """A list of (token, value, until) for each slot: `value` is added to the logit of `token` at sampled positions below
    `until`.

    The lists are tables [num_slots, W]. W grows to the longest list so far, with 20 bytes an entry. Unused entries add 0
    to token 0.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._tokens = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self._until = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self._values = torch.zeros(num_slots, 0, dtype=torch.float32, device=device)
        self._upload = Upload(device)

    def admit(self, requests: Sequence[Admitted]) -> None:
        """Writes the lists of requests that take a slot."""
        lists = [_entries(request) for request in requests]
        self._grow(max(map(len, lists)))
        width = self._tokens.shape[1]
        tokens = np.zeros((len(lists), width), dtype=np.int64)
        until = np.zeros((len(lists), width), dtype=np.int64)
        values = np.zeros((len(lists), width), dtype=np.float32)
        for row, entries in enumerate(lists):
            tokens[row, : len(entries)] = [token for token, _, _ in entries]
            values[row, : len(entries)] = [value for _, value, _ in entries]
            until[row, : len(entries)] = [end for _, _, end in entries]
        slots, *new = self._upload([np.array([r.slot for r in requests]), tokens, until, values])
        for table, rows in zip((self._tokens, self._until, self._values), new, strict=True):
            table.index_copy_(0, slots, rows)

    def add(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Adds the biases of `slots` [B] to `logits` [B, V] in place, and returns them. `positions` [B] are those of the
        tokens to sample."""
        applies = positions[:, None] < self._until.index_select(0, slots)
        values = torch.where(applies, self._values.index_select(0, slots), 0.0)
        return logits.scatter_add_(1, self._tokens.index_select(0, slots), values)

    def _grow(self, width: int) -> None:
        more = width - self._tokens.shape[1]
        if more > 0:
            self._tokens, self._until, self._values = (
                torch.nn.functional.pad(table, (0, more))
                for table in (self._tokens, self._until, self._values)
            )


def _entries(request: Admitted) -> list[tuple[int, float, int]]:
    sampling = request.sampling
    entries = [(token, value, FOR_EVER) for token, value in sampling.logit_bias]
    if sampling.min_tokens:
        until = len(request.prompt) + sampling.min_tokens
        entries += [(token, float("-inf"), until) for token in sampling.stop_token_ids]
    return entries
