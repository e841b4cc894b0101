"""One choice of a request: its tokens become text, and it ends at a stop string, a pattern or a stop token."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mla_router.worker.generation import FinishReason, Logprobs
from mla_router.worker.messages import Delta
from mla_router.worker.server.text.detokenizer import Detokenizer
from mla_router.worker.server.text.stop_regex import RegexMatcher
from mla_router.worker.server.text.stop_strings import StopMatcher


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str  # a FinishReason value
    matched: str | int | None = None  # the stop string, pattern or token that ended the choice
    stop_reason: str | int | None = None  # vLLM's: the same, but null for the model's own EOS token


class Output(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one choice and their text."""

    index: int  # of the choice
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    finish: Finish | None
    shown: int  # number of leading tokens that are part of the text; a stop token usually is not
    prompt_logprobs: Logprobs | None = None  # only in the first output, if requested

    @classmethod
    def end(cls, index: int, finish: Finish) -> Output:
        """Returns the output that only ends choice `index`."""
        return cls(index, "", [], None, finish, 0)

    @property
    def shown_ids(self) -> list[int]:
        return self.token_ids[: self.shown]


@dataclass(slots=True)
class Choice:
    """The state of one choice."""

    index: int
    rid: str  # the id under which the scheduler knows the choice
    prompt_tokens: int
    max_tokens: int
    detokenizer: Detokenizer
    matcher: StopMatcher
    patterns: RegexMatcher | None
    client_stop_ids: frozenset[int]  # the stop tokens that the client chose
    keep_stop: bool  # a stop token is part of the text
    completion_tokens: int = 0
    cached_tokens: int | None = None  # None before the first delta
    cached_here: int | None = None  # the cached tokens of this worker, for a continued stream
    finish: Finish | None = None
    accepted_drafts: int = 0
    queue_seconds: float = 0.0
    first_token_at: float = 0.0  # monotonic time, as all times
    last_token_at: float = 0.0

    def outputs_of(self, delta: Delta, *, token_by_token: bool) -> list[Output]:
        """Takes `delta`. Returns one output, or one output a token. Stops at the end of the choice."""
        if not token_by_token or len(delta.token_ids) < 2:
            return [self.advance(delta)]
        *others, last = delta.token_ids
        outputs = []
        for at, token in enumerate(others):
            step = Delta(delta.rid, [token], delta.logprobs and delta.logprobs.only(at))
            outputs.append(self.advance(step))
            if self.finish is not None:  # a stop string or pattern
                return outputs
        logprobs = delta.logprobs and delta.logprobs.only(len(others))
        end = Delta(
            delta.rid, [last], logprobs, finish_reason=delta.finish_reason, error=delta.error
        )
        return [*outputs, self.advance(end)]

    def advance(self, delta: Delta) -> Output:
        """Takes `delta` and returns its tokens and text as one output."""
        tokens = delta.token_ids
        reason = delta.finish_reason
        matched: str | int | None = None
        shown = tokens
        if reason and tokens and reason == FinishReason.STOP.value:
            matched = tokens[-1]
            shown = tokens if self.keep_stop else tokens[:-1]
        text, pattern = "", None
        for count, token in enumerate(shown, 1):
            piece = self.detokenizer.push((token,))
            text += self.matcher.push(piece)
            pattern = self.patterns.push(piece) if self.patterns is not None else None
            if self.matcher.matched is not None or pattern is not None:
                tokens = shown = shown[:count]  # the later tokens are not part of the answer
                break
        logprobs = delta.logprobs
        if logprobs is not None and len(tokens) < len(delta.token_ids):
            logprobs = logprobs.first(len(tokens))
        self.completion_tokens += len(tokens)
        if reason or pattern is not None:
            text += self.matcher.push(self.detokenizer.flush()) + self.matcher.flush()
        if self.matcher.matched is not None or pattern is not None:
            matched = self.matcher.matched or pattern
            self.finish = Finish(FinishReason.STOP.value, matched, matched)
        elif reason:
            by_client = matched in self.client_stop_ids
            self.finish = Finish(reason, matched, matched if by_client else None)
        return Output(
            self.index,
            text,
            tokens,
            logprobs,
            self.finish,
            len(shown),
            delta.prompt_logprobs,
        )
