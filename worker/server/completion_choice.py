"""One choice of /v1/completions, collected until it is sent: whole, or piece by piece."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from mla_router.worker.core import FinishReason
from mla_router.worker.server.generation import Output
from mla_router.worker.server.logprobs import CompletionLogprobs, CompletionScorer
from mla_router.worker.server.scored_tokens import ScoredTokens
from mla_router.worker.server.tokenizer import Tokenizer

# Writing the scores of one token takes some microseconds: those of more would hold up the event loop.
MAX_INLINE_TOKENS = 512


class Choice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of the answers the client wants to see."""

    n: int  # answers to each prompt
    logprobs: int | None  # of how many likely tokens in each place; None: no logprobs at all
    echo: bool  # the prompt, before the answer
    no_answer: bool  # only the prompt: what is computed behind it is not shown


class Part:
    """What of a choice has not been sent yet."""

    def __init__(self, tokenizer: Tokenizer, wanted: Wanted, prompt: list[int], shown: str) -> None:
        """`shown` is the prompt's text, if it is wanted."""
        self.begun = False  # the client knows of this choice
        self._wanted = wanted
        self._prompt = prompt
        self._scorer = CompletionScorer(tokenizer, wanted.logprobs or 0)
        self._text = [shown]
        self._after: int | None = None  # the prompt's first token, if it is to be shown
        self._tokens = ScoredTokens()
        self._finish_reason: str | None = None
        self._sum_logprobs = 0.0  # of all tokens of the answer, also those that do not show
        self._num_logprobs = 0

    @property
    def mean_logprob(self) -> float:
        return self._sum_logprobs / max(1, self._num_logprobs)

    def add(self, output: Output) -> None:
        if output.prompt_scores is not None and not self.begun:
            self._after, *others = self._prompt
            self._tokens.extend(others, output.prompt_scores)
        if self._wanted.no_answer:
            self._finish_reason = FinishReason.LENGTH.value
            return
        self._text.append(output.text)
        if self._wanted.logprobs is not None:
            self._tokens.add(output)
        self._finish_reason = output.finish.reason if output.finish else None
        if output.scores is not None:
            self._sum_logprobs += sum(output.scores.logprobs)
            self._num_logprobs += len(output.scores.logprobs)

    def skip(self, output: Output) -> None:
        """Go on behind what the client has been given."""
        if self._wanted.logprobs is not None:
            if self._wanted.echo and not self.begun:
                self._scorer.skip(self._prompt)
            self._scorer.skip(output.shown_ids)
        self._text, self.begun = [], True

    async def take(self, index: int) -> Choice:
        """Everything so far as a choice; begin anew."""
        scores = None
        if self._wanted.logprobs is not None:
            tokens, after = self._tokens, self._after
            self._tokens, self._after = ScoredTokens(), None
            if len(tokens.token_ids) <= MAX_INLINE_TOKENS:
                scores = self._scorer.score(tokens, after=after)
            else:
                scores = await asyncio.to_thread(self._scorer.score, tokens, after=after)
        choice = Choice(index, "".join(self._text), scores, self._finish_reason)
        self._text, self.begun = [], True
        return choice
