"""One choice of /v1/completions: collects outputs until they are sent, at once or in chunks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from mla_router.worker.generation import FinishReason, Logprobs
from mla_router.worker.server.endpoints.logprobs import (
    CompletionLogprobs,
    CompletionLogprobWriter,
    LoggedTokens,
    PromptLogprobs,
    prompt_logprobs,
)
from mla_router.worker.server.requests.choice import Finish, Output
from mla_router.worker.server.text.tokenizer import Tokenizer
from mla_router.worker.server.validation.details import Details

# Formatting the logprobs of a token takes some microseconds. More tokens are formatted in a thread.
MAX_INLINE_TOKENS = 512


class Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | None = None  # SGLang's
    stop_reason: str | int | None = None  # vLLM's
    # vLLM's. A missing value is absent in a chunk and null in a complete answer.
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parts of the answers that the client requests."""

    n: int  # answers to each prompt
    computed: int  # answers of which those are the best: `best_of`, or `n`
    details: Details
    echo: bool  # the text begins with the prompt
    no_answer: bool  # the response has only the prompt, not the generated token
    skip_special_tokens: bool  # also in the prompt


class CompletionChoice:
    """The part of a choice that has not been sent yet."""

    def __init__(self, tokenizer: Tokenizer, wanted: Wanted, prompt: list[int], shown: str) -> None:
        """`shown` is the text of the prompt if the client wants an echo, else empty."""
        self.begun = False  # the client knows of this choice
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._details = wanted.details
        self._prompt = prompt
        self._prompt_logprobs: Logprobs | None = None
        self._writer = CompletionLogprobWriter(
            tokenizer, wanted.details, skip_special_tokens=wanted.skip_special_tokens
        )
        self._text = [shown]
        self._after: int | None = None  # the first token of an echoed prompt; it has no logprob
        self._tokens = LoggedTokens()
        self._token_ids: list[int] = []
        self._finish: Finish | None = None
        self._sum_logprobs = 0.0  # over all tokens of the answer, also those outside the text
        self._num_logprobs = 0

    @property
    def mean_logprob(self) -> float:
        return self._sum_logprobs / max(1, self._num_logprobs)

    def add(self, output: Output) -> None:
        with_logprobs = self._details.logprobs is not None
        if output.prompt_logprobs is not None and not self.begun:
            self._prompt_logprobs = output.prompt_logprobs
            if self._wanted.echo and with_logprobs:
                self._after, *others = self._prompt
                self._tokens.extend(others, output.prompt_logprobs)
        if self._wanted.no_answer:
            self._finish = Finish(FinishReason.LENGTH.value)
            return
        self._text.append(output.text)
        self._token_ids += output.token_ids
        if with_logprobs:
            self._tokens.add(output)
        self._finish = output.finish
        if output.logprobs is not None:
            self._sum_logprobs += sum(output.logprobs.logprobs)
            self._num_logprobs += len(output.logprobs.logprobs)

    def skip(self, output: Output) -> None:
        """Takes an output that the client has received already."""
        if self._details.logprobs is not None:
            if self._wanted.echo and not self.begun:
                self._writer.skip(self._prompt)
            self._writer.skip(output.shown_ids)
        self._text, self.begun = [], True

    async def complete(self, index: int) -> Choice:
        """Returns the complete choice."""
        choice = await self.take(index)
        for name in ("token_ids", "prompt_token_ids", "prompt_logprobs"):
            if getattr(choice, name) is msgspec.UNSET:
                setattr(choice, name, None)
        return choice

    async def take(self, index: int) -> Choice:
        """Returns all outputs since the last call as a choice."""
        finish = self._finish or Finish("")
        choice = Choice(
            index,
            "".join(self._text),
            await self._take_logprobs(),
            finish.reason or None,
            finish.matched,
            finish.stop_reason,
        )
        if self._details.token_ids:
            choice.token_ids = self._token_ids
            if not self.begun:
                choice.prompt_token_ids = self._prompt
        # Without logprobs of the prompt after an early abort
        if self._details.prompt_logprobs is not None and self._prompt_logprobs is not None:
            choice.prompt_logprobs = await prompt_logprobs(
                self._tokenizer, self._prompt, self._prompt_logprobs, self._details.prompt_logprobs
            )
        self._text, self._token_ids, self.begun = [], [], True
        return choice

    async def _take_logprobs(self) -> CompletionLogprobs | None:
        if self._details.logprobs is None:
            return None
        tokens, after = self._tokens, self._after
        self._tokens, self._after = LoggedTokens(), None
        if len(tokens.token_ids) <= MAX_INLINE_TOKENS:
            return self._writer.write(tokens, after=after)
        return await asyncio.to_thread(self._writer.write, tokens, after=after)
