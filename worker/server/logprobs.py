"""Log-probabilities of sampled tokens in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mla_router.worker.server.scored_tokens import ScoredTokens
from mla_router.worker.server.tokenizer import Tokenizer


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]  # most likely first


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: None = None


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

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._offset = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """These come first, and were scored elsewhere."""
        self._offset += len(self._detokenizer.push(token_ids))

    def score(self, tokens: ScoredTokens) -> CompletionLogprobs:
        """Of the next tokens. Those that share a character begin where that character does."""
        offsets = []
        for token in tokens.token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token]))
        texts = [self._tokenizer.text_of(token) for token in tokens.token_ids]
        return CompletionLogprobs(texts, tokens.logprobs, offsets)
