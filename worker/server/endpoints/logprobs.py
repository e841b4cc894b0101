"""Log-probabilities in OpenAI's two forms (chat, completions), and those of prompts in vLLM's form."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from mla_router.worker.generation import Logprobs
from mla_router.worker.server.requests.choice import Output
from mla_router.worker.server.text.tokenizer import Tokenizer
from mla_router.worker.server.validation.details import Details


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: list[TopLogprob]  # most likely first


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Aligned lists. The first token of a prompt has null, because no token precedes it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None  # 1 is the most likely; null: beyond the requested number of tokens
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


@dataclass(slots=True)
class LoggedTokens:
    """Tokens of one choice with their logprobs, collected until they are sent. The lists are aligned. The lists of
    logprobs are empty if the request wants none."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)  # for each token, most likely first
    top_logprobs: list[list[float]] = field(default_factory=list)

    def add(self, output: Output) -> None:
        """Takes the tokens of the text. A stop token is not among them."""
        self.extend(output.shown_ids, output.logprobs)

    def extend(self, token_ids: Sequence[int], logprobs: Logprobs | None) -> None:
        """Takes `token_ids`. `logprobs` may have more tokens."""
        self.token_ids += token_ids
        if logprobs is not None:
            size = len(token_ids)
            self.logprobs += logprobs.logprobs[:size]
            self.top_ids += logprobs.top_ids[:size]
            self.top_logprobs += logprobs.top_logprobs[:size]


def chat_logprobs(tokenizer: Tokenizer, tokens: LoggedTokens, details: Details) -> ChatLogprobs:
    name_of = details.name_of(tokenizer)

    def entry(token: int, logprob: float) -> TopLogprob:
        return TopLogprob(name_of(token), logprob, tokenizer.bytes_of(token))

    content = []
    for at, (token, logprob) in enumerate(zip(tokens.token_ids, tokens.logprobs, strict=True)):
        top = []
        if details.logprobs:
            top = list(map(entry, tokens.top_ids[at], tokens.top_logprobs[at]))[: details.logprobs]
        content.append(TokenLogprob(name_of(token), logprob, tokenizer.bytes_of(token), top))
    return ChatLogprobs(content)


async def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Logprobs, top: int
) -> PromptLogprobs:
    """Returns an entry for each token of `prompt`; None for the first. `logprobs` belong to the other tokens. Works in a
    thread, because there may be millions of logprobs."""
    return await asyncio.to_thread(_prompt_logprobs, tokenizer, prompt, logprobs, top)


def _prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Logprobs, top: int
) -> PromptLogprobs:
    places: PromptLogprobs = [None]
    for at, (token, logprob) in enumerate(zip(prompt[1:], logprobs.logprobs, strict=True)):
        likely = logprobs.top_ids[at] if logprobs.top_ids else []
        rank = likely.index(token) + 1 if token in likely else None
        place = {token: PromptLogprob(logprob, rank, tokenizer.text_of(token))}
        for number, other in enumerate(likely[:top]):
            of_other = logprobs.top_logprobs[at][number]
            place.setdefault(other, PromptLogprob(of_other, number + 1, tokenizer.text_of(other)))
        places.append(place)
    return places


class CompletionLogprobWriter:
    """Writes logprobs in the form of /v1/completions, with the offset of each token in the text."""

    def __init__(
        self, tokenizer: Tokenizer, details: Details, *, skip_special_tokens: bool = True
    ) -> None:
        self._name_of = details.name_of(tokenizer)
        self._top = details.logprobs or 0
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """Skips leading tokens, which have no logprobs here."""
        self._offset += len(self._detokenizer.push(token_ids))

    def write(self, tokens: LoggedTokens, *, after: int | None = None) -> CompletionLogprobs:
        """Returns the logprobs of the next tokens. `after`: the first token of a prompt, which precedes them.

        Tokens that share a character have the offset of this character.
        """
        first = [] if after is None else [after]
        ids = first + tokens.token_ids
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token]))
        nothing: list[None] = [None] * len(first)
        top = nothing + [self._likeliest(tokens, at) for at in range(len(tokens.token_ids))]
        names = [self._name_of(token) for token in ids]
        return CompletionLogprobs(names, nothing + tokens.logprobs, offsets, top)

    def _likeliest(self, tokens: LoggedTokens, at: int) -> dict[str, float]:
        """Returns the most likely tokens at position `at`, and the sampled one. Of tokens with the same text, the most
        likely one is returned."""
        logprobs: dict[str, float] = {}
        if self._top:
            ids, values = tokens.top_ids[at][: self._top], tokens.top_logprobs[at]
            for token, logprob in zip(ids, values, strict=False):
                logprobs.setdefault(self._name_of(token), logprob)
        logprobs.setdefault(self._name_of(tokens.token_ids[at]), tokens.logprobs[at])
        return logprobs
