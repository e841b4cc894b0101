"""One choice of /generate in SGLang's form, which grows with each output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from mla_router.worker.generation import FinishReason, Logprobs
from mla_router.worker.server.requests.choice import Finish, Output
from mla_router.worker.server.requests.handler import RequestHandler
from mla_router.worker.server.text.tokenizer import Tokenizer

# Logprob, token id, and the token's text if requested. The first logged token of a prompt has no logprob.
LogprobEntry = tuple[float | None, int, str | None]
Top = list[LogprobEntry] | None


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    input_token_logprobs: list[LogprobEntry] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[LogprobEntry] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[Top] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[Top] | msgspec.UnsetType = msgspec.UNSET
    e2e_latency: float | msgspec.UnsetType = msgspec.UNSET  # seconds; only in a complete answer


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer so far. Each event of a stream repeats the earlier text."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET  # only in a stream of several choices


class LogprobList:
    """Tokens with their logprobs and the most likely tokens at each position."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """`tokenizer` writes the texts of tokens; None: no texts."""
        self._tokenizer = tokenizer
        self.tokens: list[LogprobEntry] = []
        self.top: list[Top] = []

    def add(self, token_ids: Sequence[int], scores: Logprobs) -> None:
        self.tokens += map(self._entry, scores.logprobs, token_ids)
        for ids, logprobs in zip(scores.top_ids, scores.top_logprobs, strict=True):
            self.top.append(list(map(self._entry, logprobs, ids)))

    def add_first(self, token_id: int) -> None:
        self.tokens.append(self._entry(None, token_id))
        self.top.append(None)

    def _entry(self, logprob: float | None, token_id: int) -> LogprobEntry:
        return logprob, token_id, self._tokenizer.text_of(token_id) if self._tokenizer else None


class GrowingAnswer:
    def __init__(
        self,
        handler: RequestHandler,
        index: int,
        begun: float,
        *,
        token_texts: bool,
        no_answer: bool,
    ) -> None:
        """`begun` is the monotonic time of the request. `no_answer`: only the prompt is shown."""
        self._handler = handler
        self._index = index
        self._begun = begun
        self._no_answer = no_answer
        self._rid = handler.identity.choice_id(index)
        self._params = handler.sampling.params
        self._prompt = handler.prompts[index // handler.sampling.n]
        tokenizer = handler.service.tokenizer if token_texts else None
        self._input = LogprobList(tokenizer)
        self._output = LogprobList(tokenizer)
        self._text = ""
        self._ids: list[int] = []
        self.finish: Finish | None = None

    def add(self, output: Output) -> None:
        self.finish = output.finish
        if not self._no_answer:
            self._text += output.text
            self._ids += output.token_ids
            if output.logprobs is not None:
                self._output.add(output.token_ids, output.logprobs)
        elif self.finish is not None and self.finish.reason == FinishReason.STOP.value:
            self.finish = Finish(FinishReason.LENGTH.value)
        start = self._params.prompt_logprobs_from
        if start is not None and output.prompt_logprobs is not None:
            self._input.add_first(self._prompt[start - 1])
            self._input.add(self._prompt[start:], output.prompt_logprobs)

    def so_far(self, *, numbered: bool) -> Answer:
        handler, params = self._handler, self._params
        usage = handler.usage_of(self._index)
        with_logprobs, top = params.logprobs, params.logprobs and params.top_logprobs > 0
        ended = self.finish is not None
        meta = MetaInfo(
            id=self._rid,
            finish_reason=None if self.finish is None else self._finish_reason(self.finish),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=0 if self._no_answer else usage.completion_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            input_token_logprobs=self._input.tokens if with_logprobs else msgspec.UNSET,
            output_token_logprobs=self._output.tokens if with_logprobs else msgspec.UNSET,
            input_top_logprobs=self._input.top if top else msgspec.UNSET,
            output_top_logprobs=self._output.top if top else msgspec.UNSET,
            e2e_latency=time.monotonic() - self._begun if ended else msgspec.UNSET,
        )
        index = self._index if numbered else msgspec.UNSET
        return Answer(text=self._text, output_ids=self._ids, meta_info=meta, index=index)

    def _finish_reason(self, finish: Finish) -> dict[str, Any]:
        if finish.reason == FinishReason.LENGTH.value:
            return {"type": finish.reason, "length": len(self._ids)}
        if finish.reason == FinishReason.STOP.value:
            return {"type": finish.reason, "matched": finish.matched}
        return {"type": finish.reason, "message": "Aborted"}
