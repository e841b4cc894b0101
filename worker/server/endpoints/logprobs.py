"""Log-probabilities: of sampled tokens in OpenAI's two shapes, of prompts in vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from mla_router.worker.core import Logprobs
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
    """The lists are aligned. Null: of a prompt's first token, which nothing predicts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None  # 1 is the likeliest; null: behind those that were asked for
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


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

    def extend(self, token_ids: Sequence[int], logprobs: Logprobs | None) -> None:
        """Take `token_ids`; there may be log-probabilities of more tokens than these."""
        self.token_ids += token_ids
        if logprobs is not None:
            size = len(token_ids)
            self.logprobs += logprobs.logprobs[:size]
            self.top_ids += logprobs.top_ids[:size]
            self.top_logprobs += logprobs.top_logprobs[:size]


def chat_logprobs(tokenizer: Tokenizer, tokens: ScoredTokens, details: Details) -> ChatLogprobs:
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


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Logprobs, top: int
) -> PromptLogprobs:
    """Of all tokens of `prompt` but the first, which nothing predicts; `scores` are theirs."""
    places: PromptLogprobs = [None]
    for at, (token, logprob) in enumerate(zip(prompt[1:], scores.logprobs, strict=True)):
        likely = scores.top_ids[at] if scores.top_ids else []
        rank = likely.index(token) + 1 if token in likely else None
        place = {token: PromptLogprob(logprob, rank, tokenizer.text_of(token))}
        for number, other in enumerate(likely[:top]):
            of_other = scores.top_logprobs[at][number]
            place.setdefault(other, PromptLogprob(of_other, number + 1, tokenizer.text_of(other)))
        places.append(place)
    return places


class CompletionScorer:
    """Tokens of one prompt's answer, as they come, to logprobs with their place in the text."""

    def __init__(self, tokenizer: Tokenizer, details: Details) -> None:
        self._name_of = details.name_of(tokenizer)
        self._top = details.logprobs or 0
        self._detokenizer = tokenizer.detokenizer()
        self._offset = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """These come first, and were scored elsewhere."""
        self._offset += len(self._detokenizer.push(token_ids))

    def score(self, tokens: ScoredTokens, *, after: int | None = None) -> CompletionLogprobs:
        """Of the next tokens, and of `after`, a prompt's first token, if it comes before them.
        Those that share a character begin where that character does."""
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

    def _likeliest(self, tokens: ScoredTokens, at: int) -> dict[str, float]:
        """By their names, with the token itself; of those that have the same name, the most likely one."""
        logprobs: dict[str, float] = {}
        if self._top:
            ids, values = tokens.top_ids[at][: self._top], tokens.top_logprobs[at]
            for token, logprob in zip(ids, values, strict=False):
                logprobs.setdefault(self._name_of(token), logprob)
        logprobs.setdefault(self._name_of(tokens.token_ids[at]), tokens.logprobs[at])
        return logprobs
