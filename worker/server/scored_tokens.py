"""Tokens of one choice with their log-probabilities, collected until they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mla_router.worker.core import Logprobs
from mla_router.worker.server.generation import Output


@dataclass(slots=True)
class ScoredTokens:
    """The lists are aligned; those of scores are empty if the request wants none."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)  # of each token, most likely first
    top_logprobs: list[list[float]] = field(default_factory=list)

    def add(self, output: Output) -> None:
        """Take the tokens that are part of the text: a stop token is not."""
        self.extend(output.shown_ids, output.logprobs)

    def extend(self, token_ids: Sequence[int], scores: Logprobs | None) -> None:
        """Take `token_ids`; there may be scores of more tokens than these."""
        self.token_ids += token_ids
        if scores is not None:
            size = len(token_ids)
            self.logprobs += scores.logprobs[:size]
            self.top_ids += scores.top_ids[:size]
            self.top_logprobs += scores.top_logprobs[:size]
