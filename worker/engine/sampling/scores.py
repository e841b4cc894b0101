"""Log-probabilities of chosen tokens, and of the likeliest ones beside them.

They are of the softmax of the model's logits over the tokens that may be sampled: behind a grammar's mask and
`allowed_token_ids`, before biases, penalties and temperature. A forbidden token has no log-probability, and is
none of the likeliest, of which there are then fewer than asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_router.worker.core import Scores

# Rows whose logits exist at a time when a prompt is scored: 132 MB of float32 for V = 129,280.
SLICE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive scored rows that belong to one sampled row or to one chunk."""

    owner: int  # index of the row in `StepPlan.sampled_slots`, or of the chunk
    length: int
    num_top: int


@dataclass(frozen=True, slots=True)
class RowScores:
    """Scores of L rows on the device, K of the likeliest tokens each, and whose they are."""

    runs: Sequence[Run]
    logprobs: Tensor  # [L] float32
    top_ids: Tensor  # [L, K] int64, most likely first
    top_logprobs: Tensor  # [L, K] float32

    def by_owner(self, num_owners: int) -> list[Scores | None]:
        """For rows that are on the host."""
        logprobs, ids, tops = (t.tolist() for t in (self.logprobs, self.top_ids, self.top_logprobs))
        num_possible = (self.top_logprobs > -math.inf).sum(dim=-1).tolist()
        scores: list[Scores | None] = [None] * num_owners
        at = 0
        for run in self.runs:
            rows = slice(at, at + run.length)
            at += run.length
            if run.num_top:
                possible = [min(run.num_top, number) for number in num_possible[rows]]
                scores[run.owner] = Scores(
                    logprobs[rows],
                    [row[:end] for row, end in zip(ids[rows], possible, strict=True)],
                    [row[:end] for row, end in zip(tops[rows], possible, strict=True)],
                )
            else:
                scores[run.owner] = Scores(logprobs[rows])
        return scores


def score(logits: Tensor, tokens: Tensor, runs: Sequence[Run]) -> RowScores:
    """Of `tokens` [L] int64 by the softmax of `logits` [L, V] float32; `runs` cover the L rows."""
    total = logits.logsumexp(dim=-1)
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    num_top = max(run.num_top for run in runs)
    values, ids = logits.topk(num_top, dim=-1) if num_top else _none(logits)
    return RowScores(runs, chosen - total, ids, values - total[:, None])


def _none(logits: Tensor) -> tuple[Tensor, Tensor]:
    shape = len(logits), 0
    return logits.new_empty(shape), torch.empty(shape, dtype=torch.int64, device=logits.device)


def score_hidden(
    hidden: Tensor, logits_of: Callable[[Tensor], Tensor], tokens: Tensor, runs: Sequence[Run]
) -> RowScores:
    """The same from hidden states [L, hidden_size], never with more than SLICE_ROWS of logits."""
    parts = [
        score(logits_of(some_hidden), some_tokens, runs)
        for some_hidden, some_tokens in zip(
            torch.split(hidden, SLICE_ROWS), torch.split(tokens, SLICE_ROWS), strict=True
        )
    ]
    return RowScores(
        runs,
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )
