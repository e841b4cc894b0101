"""Log-probabilities of sampled tokens in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mla_router.worker.server.scored_tokens import ScoredTokens
from mla_router.worker.server.tokenizer import Tokenizer


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
    top_logprobs: list[dict[str, float] | None] | None  # null: none are wanted


def chat_logprobs(tokenizer: Tokenizer, tokens: ScoredTokens) -> ChatLogprobs:
    def entry(token: int, logprob: float) -> TopLogprob:
        return TopLogprob(tokenizer.text_of(token), logprob, tokenizer.bytes_of(token))

    content = []
    for at, (token, logprob) in enumerate(zip(tokens.token_ids, tokens.logprobs, strict=True)):
        top = []
        if tokens.top_ids:
            top = list(map(entry, tokens.top_ids[at], tokens.top_logprobs[at]))
        content.append(
            TokenLogprob(tokenizer.text_of(token), logprob, tokenizer.bytes_of(token), top)
        )
    return ChatLogprobs(content)


class CompletionScorer:
    """Tokens of one prompt's answer, as they come, to logprobs with their place in the text."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        """`top` is how many of the likeliest tokens are wanted in each place."""
        self._tokenizer = tokenizer
        self._top = top
        self._detokenizer = tokenizer.detokenizer()
        self._offset = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """These come first, and were scored elsewhere."""
        self._offset += len(self._detokenizer.push(token_ids))

    def score(self, tokens: ScoredTokens, *, after: int | None = None) -> CompletionLogprobs:
        """Of the next tokens, and of `after`, a prompt's first token, if it comes before them.
        Those that share a character begin where that character does."""
        first = [] if after is None else [after]
        tokenizer, ids = self._tokenizer, first + tokens.token_ids
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token]))
        nothing: list[None] = [None] * len(first)
        top = None
        if self._top:
            top = nothing + [self._likeliest(tokens, at) for at in range(len(tokens.token_ids))]
        return CompletionLogprobs(
            [tokenizer.text_of(token) for token in ids], nothing + tokens.logprobs, offsets, top
        )

    def _likeliest(self, tokens: ScoredTokens, at: int) -> dict[str, float]:
        """By their text; of those that have the same, the most likely one."""
        logprobs: dict[str, float] = {}
        for token, logprob in zip(tokens.top_ids[at], tokens.top_logprobs[at], strict=True):
            logprobs.setdefault(self._tokenizer.text_of(token), logprob)
        logprobs.setdefault(self._tokenizer.text_of(tokens.token_ids[at]), tokens.logprobs[at])
        return logprobs
