"""Log-probabilities of given tokens, and the most likely tokens at their positions.

They come from the softmax of the model's logits over the tokens that may be sampled: after a grammar's token bitmask
and `allowed_token_ids`, before logit biases, penalties and temperature. A masked token has no log-probability and is
not among the most likely tokens, so there may be fewer of these than requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_router.worker.generation import Logprobs

# Prompt rows whose logits exist at a time: 132 MB of float32 for V = 129,280.
SLICE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows with logprobs that belong to one sampled row or to one chunk."""

    owner: int  # index of the row in `StepPlan.sampled_slots`, or of the chunk
    length: int
    num_top: int


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Logprobs of L rows on the device, each with K most likely tokens, and the owners of the rows."""

    runs: Sequence[Run]
    logprobs: Tensor  # [L] float32
    top_ids: Tensor  # [L, K] int64, most likely first
    top_logprobs: Tensor  # [L, K] float32

    def by_owner(self, num_owners: int) -> list[Logprobs | None]:
        """Returns the logprobs of each owner, or None for an owner without. The tensors must be on the host."""
        logprobs, ids, tops = (t.tolist() for t in (self.logprobs, self.top_ids, self.top_logprobs))
        num_possible = (self.top_logprobs > -math.inf).sum(dim=1).tolist()
        owned: list[Logprobs | None] = [None] * num_owners
        at = 0
        for run in self.runs:
            rows = slice(at, at + run.length)
            at += run.length
            if run.num_top:
                possible = [min(run.num_top, number) for number in num_possible[rows]]
                owned[run.owner] = Logprobs(
                    logprobs[rows],
                    [row[:end] for row, end in zip(ids[rows], possible, strict=True)],
                    [row[:end] for row, end in zip(tops[rows], possible, strict=True)],
                )
            else:
                owned[run.owner] = Logprobs(logprobs[rows])
        return owned


def token_logprobs(logits: Tensor, tokens: Tensor, runs: Sequence[Run]) -> RowLogprobs:
    """Returns the logprobs of `tokens` [L] int64 by the softmax of `logits` [L, V] float32. `runs` cover the L rows."""
    total = logits.logsumexp(dim=1)
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    num_top = max(run.num_top for run in runs)
    values, ids = logits.topk(num_top) if num_top else _none(logits)
    return RowLogprobs(runs, chosen - total, ids, values - total[:, None])


def _none(logits: Tensor) -> tuple[Tensor, Tensor]:
    shape = len(logits), 0
    return logits.new_empty(shape), torch.empty(shape, dtype=torch.int64, device=logits.device)


def prompt_token_logprobs(
    hidden_states: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    tokens: Tensor,
    runs: Sequence[Run],
) -> RowLogprobs:
    """Returns the same from `hidden_states` [L, hidden_size], with the logits of at most SLICE_ROWS rows at a time."""
    parts = [
        token_logprobs(logits_of(some_states), some_tokens, runs)
        for some_states, some_tokens in zip(
            torch.split(hidden_states, SLICE_ROWS), torch.split(tokens, SLICE_ROWS), strict=True
        )
    ]
    return RowLogprobs(
        runs,
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )
