"""Tokens of one choice with their log-probabilities, collected until they are shown."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        self.token_ids += output.shown_ids
        if output.scores is not None:
            self.logprobs += output.scores.logprobs[: output.shown]
            self.top_ids += output.scores.top_ids[: output.shown]
            self.top_logprobs += output.scores.top_logprobs[: output.shown]
