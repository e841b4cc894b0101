"""The running of one HTTP request's prompts, from token ids to text.

Each prompt has `n` answers, its choices: they lie beside each other, those of the first prompt first.

Every generating endpoint goes through here, so limits, stop strings, seeds, aborts and metrics are
the same for all; the endpoints only give the output its shape.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mla_router.worker.core import FinishReason, Logprobs
from mla_router.worker.messages import Delta, Generate
from mla_router.worker.server.errors import (
    ENGINE_DIED,
    InternalError,
    InvalidField,
    Unavailable,
)
from mla_router.worker.server.ipc.mailbox import make_mailbox
from mla_router.worker.server.ipc.scheduler_client import Mailbox
from mla_router.worker.server.request_names import Names
from mla_router.worker.server.requests.backlog import check_backlog
from mla_router.worker.server.requests.replay import HEADER, Marks, Origin, Replay, invalid_ids
from mla_router.worker.server.requests.usage import Usage
from mla_router.worker.server.schema.continuation import MAX_PROMPTS
from mla_router.worker.server.state import Service
from mla_router.worker.server.text.detokenizer import Detokenizer
from mla_router.worker.server.text.stop_regex import RegexMatcher
from mla_router.worker.server.text.stop_strings import StopMatcher
from mla_router.worker.server.validation.sampling import Sampling, check_priority, draw_seed, fit

_FAILURES = (FinishReason.REFUSED.value, FinishReason.LOST.value, FinishReason.ERROR.value)
RESUMED_A_TURN = 1024  # tokens of a continued answer: about a millisecond of detokenizing


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str  # a FinishReason value
    matched: str | int | None = None  # the stop string, pattern or token, if one ended it
    stop_reason: str | int | None = None  # vLLM's: the same, unless it is the model's own token


class Output(msgspec.Struct, frozen=True, gc=False):
    """What is new of one choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    finish: Finish | None
    shown: int  # of the tokens, how many are part of the text: a stop token is rarely
    prompt_logprobs: Logprobs | None = None  # with the first output, if they are wanted

    @property
    def shown_ids(self) -> list[int]:
        return self.token_ids[: self.shown]


@dataclass(slots=True)
class _Choice:
    """One answer and how far it has got."""

    rid: str
    prompt_tokens: int
    max_tokens: int
    detokenizer: Detokenizer
    matcher: StopMatcher
    patterns: RegexMatcher | None
    completion_tokens: int = 0
    cached_tokens: int | None = None  # known from the first delta on
    cached_here: int | None = None  # the same, also if another worker had begun the answer
    finish: Finish | None = None
    last_token_at: float = 0.0


@dataclass(slots=True)
class Generation:
    """One HTTP request's prompts and what has come of them so far."""

    service: Service
    prompts: list[list[int]]
    sampling: Sampling
    default_max_tokens: int | None = None
    cache_key: str = ""
    name: str | list[str] | None = None  # the client's own, to abort it by; or one a choice
    trace: str | None = None  # the client's X-Request-Id, which need not be its own
    replay: Replay | None = None
    priority: int | None = None
    markers: frozenset[str] = frozenset()  # special tokens that are shown all the same
    token_by_token: bool = False  # an output for each token, however many come at a time
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    origin: Origin = field(init=False)
    resumed: list[Output] = field(default_factory=list)  # what the client had before
    _due: list[Output] = field(default_factory=list)  # ends of choices that it does not know of
    _choices: list[_Choice] = field(default_factory=list)
    _mailbox: Mailbox = field(init=False)
    _unfinished: int = 0
    _begun: float = 0.0

    def __post_init__(self) -> None:
        self._mailbox = make_mailbox(self.service.config.stream_interval)
        if self.replay is not None and self.replay.origin is not None:
            self.origin = self.replay.origin
            return
        fingerprint, configured = self.service.fingerprint, self.service.config.random_seed
        self.origin = Origin(
            bytes.fromhex(self.id),
            int(time.time()),
            fingerprint,
            *draw_seed(self.sampling.seed, configured),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Whatever still runs at the end of the block gets aborted, whether the client has gone,
        an error came up, or a sibling failed."""
        service = self.service
        requests = self._check()
        if self.replay is not None:
            await self._resume(self.replay, requests)
        names = self._names([request.rid for request in requests])
        # A stream can come back to where it was before the worker has noticed that it had left.
        await service.names.add(names, replace=self.continues)
        self._begun = time.monotonic()
        try:
            for index, request in enumerate(requests):
                if self._choices[index].finish is None:
                    # The answers to one prompt share its computation.
                    computes = index % self.sampling.n == 0
                    service.scheduler.submit(request, self._mailbox, index, computes=computes)
                    service.metrics.requests.inc()
                    self._unfinished += 1
            yield
        finally:
            service.names.remove(names)
            for choice in self._choices:
                if choice.finish is None:
                    service.scheduler.abort(choice.rid)
                    self._count_end(choice, FinishReason.ABORT.value)

    @property
    def size(self) -> int:
        """How many choices there are."""
        return len(self.prompts) * self.sampling.n

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many answers it has."""
        return Usage.of(
            sum(choice.prompt_tokens for choice in self._firsts),
            sum(choice.completion_tokens for choice in self._choices),
            sum(choice.cached_tokens or 0 for choice in self._firsts),
        )

    def id_of(self, prefix: str) -> str:
        """The id of the answer, which the client can abort it by."""
        if self.name is not None:
            return self.name if isinstance(self.name, str) else self.name[0]
        return prefix + (self.trace or self.origin.id.hex())

    def envelope(self, prefix: str, model: str) -> dict[str, Any]:
        """The fields that an answer and all its chunks share."""
        return {
            "id": self.id_of(prefix),
            "created": self.origin.created,
            "model": model,
            "system_fingerprint": self.origin.fingerprint,
        }

    def rid_of(self, index: int) -> str:
        """What the client knows a choice by."""
        if isinstance(self.name, list):
            return self.name[index]
        name = self.name or self.origin.id.hex()
        return name if self.size == 1 else f"{name}-{index}"

    def usage_of(self, index: int) -> Usage:
        choice = self._choices[index]
        return Usage.of(choice.prompt_tokens, choice.completion_tokens, choice.cached_tokens or 0)

    @property
    def headers(self) -> dict[str, str]:
        """What the router learns from, sent with the first byte. The cached tokens of a batch are
        left out until all its prompts have begun."""
        headers = {"x-mla-prompt-tokens": str(sum(c.prompt_tokens for c in self._firsts))}
        cached = [c.cached_here for c in self._firsts if c.cached_here is not None]
        if len(cached) == len(self.prompts):
            headers["x-mla-cached-tokens"] = str(sum(cached))
        if self.replay is not None:
            cached_tokens = [choice.cached_tokens for choice in self._choices]
            origin = msgspec.structs.replace(self.origin, cached_tokens=cached_tokens)
            headers[HEADER] = origin.encode()
        return headers

    @property
    def continues(self) -> bool:
        """The client has had the beginning of this stream already."""
        return self.replay is not None and self.replay.origin is not None

    @property
    def known(self) -> list[int]:
        """The choices of which the client has had something before."""
        said = [] if self.replay is None else self.replay.choices
        return [
            index for index, choice in enumerate(said) if choice.token_ids or choice.finish_reason
        ]

    def marks(self) -> Marks:
        return Marks(wanted=self.replay is not None)

    async def next(self) -> list[Output]:
        """What has come since the last call; an empty list when all prompts have finished."""
        outputs, self._due = self._due, []
        while not outputs and self._unfinished:
            arrived = await self._mailbox.take()
            now = time.monotonic()
            for index, delta in arrived:
                choice = self._choices[index]
                if choice.finish is None:  # else a stop string has ended it before this delta
                    outputs += self._outputs_of(choice, index, delta)
                    self._note(choice, delta, now)
        return outputs

    @property
    def _firsts(self) -> list[_Choice]:
        """The first choice of each prompt: it computes the prompt, the others find it cached."""
        return self._choices[:: self.sampling.n]

    def _names(self, rids: list[str]) -> Names:
        names = {self.origin.id.hex(): rids}
        if isinstance(self.name, list):
            names |= {name: [rid] for name, rid in zip(self.name, rids, strict=True)}
        elif self.name is not None:
            names[self.name] = rids
        return Names(names, self.trace, rids)

    # -- inside ----------------------------------------------------------------------------------

    def _check(self) -> list[Generate]:
        """Refuse what cannot be run, before anything of it runs."""
        service, sampling, config = self.service, self.sampling, self.service.config
        limits = service.limits
        if sampling.constraint is not None and config.grammar_backend == "none":
            raise sampling.constraint.refused("this worker runs with --grammar-backend none")
        check_priority(self.priority, enabled=config.enable_priority_scheduling)
        if self.size > MAX_PROMPTS:
            raise InvalidField(
                "n",
                f"{sampling.n} answers to each of {len(self.prompts)} prompts are more than "
                f"{MAX_PROMPTS}",
            )
        check_backlog(config, limits, service.scheduler, self.size)
        if self.replay is not None:
            self.replay.check(self.size, limits.vocab_size)
        requests = []
        for index in range(self.size):
            prompt = self.prompts[index // sampling.n]
            rid = self.id if self.size == 1 else f"{self.id}-{index}"
            max_tokens = fit(sampling, len(prompt), limits, self.default_max_tokens)
            self._choices.append(
                _Choice(
                    rid,
                    len(prompt),
                    max_tokens,
                    service.tokenizer.detokenizer(
                        skip_special_tokens=sampling.skip_special_tokens, shown=self.markers
                    ),
                    StopMatcher(sampling.stop, keep=sampling.keep_stop),
                    RegexMatcher(sampling.stop_regex) if sampling.stop_regex else None,
                )
            )
            requests.append(
                Generate(
                    rid=rid,
                    prompt=prompt,
                    sampling=sampling.params_of(
                        max_tokens=max_tokens,
                        seed=self.origin.seed_of(index, sampling.n),
                        eos_ids=service.tokenizer.eos_ids,
                    ),
                    cache_salt=self.cache_key,
                    priority=self.priority or 0,
                    grammar=sampling.constraint.grammar if sampling.constraint else None,
                    server=service.scheduler.server,
                )
            )
        return requests

    async def _resume(self, replay: Replay, requests: list[Generate]) -> None:
        """Bring choices and requests to where the client has them."""
        for choice, cached in zip(self._choices, self.origin.cached_tokens, strict=False):
            choice.cached_tokens = cached
        for index, said in enumerate(replay.choices):
            choice, request, ids = self._choices[index], requests[index], said.token_ids
            stop_ids = request.sampling.stop_token_ids
            if len(ids) > choice.max_tokens:
                raise invalid_ids(index, f"{len(ids)} are more than the request may have")
            if not stop_ids.isdisjoint(ids[:-1]):
                raise invalid_ids(index, "go on after a token that ends the answer")
            if ids:
                await self._feed(choice, index, ids, stop_ids)
            if said.finish_reason is not None and choice.finish is None:
                # No token has said so, as of an abort: the client has had what was still held back, too.
                end = Delta(choice.rid, [], finish_reason=said.finish_reason)
                self.resumed.append(self._advance(choice, index, end))
            elif said.finish_reason is not None:
                choice.finish = Finish(said.finish_reason)
                self.resumed.append(_end(index, choice.finish))
            elif choice.finish is not None:
                # It was about to be told that its answer has ended, when the stream broke.
                self._due.append(_end(index, choice.finish))
            choice.completion_tokens = len(ids)
            requests[index] = msgspec.structs.replace(request, output=ids)

    async def _feed(
        self, choice: _Choice, index: int, ids: list[int], stop_ids: frozenset[int]
    ) -> None:
        """Advance by tokens that are known, as if the scheduler had just sent them."""
        reason = ""
        if ids[-1] in stop_ids:
            reason = FinishReason.STOP.value
        elif len(ids) == choice.max_tokens:
            reason = FinishReason.LENGTH.value
        for start in range(0, len(ids), RESUMED_A_TURN):
            turn = ids[start : start + RESUMED_A_TURN]
            is_last = start + len(turn) == len(ids)
            delta = Delta(choice.rid, turn, finish_reason=reason if is_last else "")
            self.resumed += self._outputs_of(choice, index, delta)
            if choice.finish is not None:
                return
            await asyncio.sleep(0)

    def _outputs_of(self, choice: _Choice, index: int, delta: Delta) -> list[Output]:
        if not self.token_by_token or len(delta.token_ids) < 2:
            return [self._advance(choice, index, delta)]
        *others, last = delta.token_ids
        outputs = []
        for at, token in enumerate(others):
            step = Delta(delta.rid, [token], _logprobs_of(delta.logprobs, at))
            outputs.append(self._advance(choice, index, step))
            if choice.finish is not None:  # by a stop string
                return outputs
        logprobs = _logprobs_of(delta.logprobs, len(others))
        end = Delta(
            delta.rid, [last], logprobs, finish_reason=delta.finish_reason, error=delta.error
        )
        return [*outputs, self._advance(choice, index, end)]

    def _advance(self, choice: _Choice, index: int, delta: Delta) -> Output:
        if delta.finish_reason:
            self._check_end(choice, delta)
        tokens = delta.token_ids
        reason = delta.finish_reason
        matched: str | int | None = None
        shown = tokens
        if reason and tokens and reason == FinishReason.STOP.value:
            matched = tokens[-1]
            shown = tokens if self.sampling.keep_stop else tokens[:-1]
        text, pattern = "", None
        for count, token in enumerate(shown, 1):
            piece = choice.detokenizer.push((token,))
            text += choice.matcher.push(piece)
            pattern = choice.patterns.push(piece) if choice.patterns is not None else None
            if choice.matcher.matched is not None or pattern is not None:
                tokens = shown = shown[:count]  # what came with it is no part of the answer
                break
        choice.completion_tokens += len(tokens)
        if reason or pattern is not None:
            text += choice.matcher.push(choice.detokenizer.flush()) + choice.matcher.flush()
        if choice.matcher.matched is not None or pattern is not None:
            matched = choice.matcher.matched or pattern
            choice.finish = Finish(FinishReason.STOP.value, matched, matched)
            self.service.scheduler.abort(choice.rid)  # it knows nothing of what stops a text
        elif reason:
            asked_for = matched in self.sampling.params.stop_token_ids
            choice.finish = Finish(reason, matched, matched if asked_for else None)
        return Output(
            index, text, tokens, delta.logprobs, choice.finish, len(shown), delta.prompt_logprobs
        )

    def _check_end(self, choice: _Choice, delta: Delta) -> None:
        """Raise if the last delta of a choice says that something went wrong."""
        reason = delta.finish_reason
        if reason not in _FAILURES:
            return
        choice.finish = Finish(reason)  # the scheduler has ended it: nothing to abort
        self._count_end(choice, reason)
        if reason == FinishReason.REFUSED.value:
            assert self.sampling.constraint is not None, "nothing else can be wrong so late"
            raise self.sampling.constraint.refused(delta.error)
        if reason == FinishReason.LOST.value:
            raise Unavailable(delta.error, code=ENGINE_DIED, retry_after=1)
        raise InternalError(delta.error or "The scheduler could not run this request")

    def _note(self, choice: _Choice, delta: Delta, now: float) -> None:
        """Count what a delta from the scheduler has brought."""
        if choice.cached_here is None:
            choice.cached_here = min(delta.cached_tokens, choice.prompt_tokens)
            self.service.metrics.queue_time.observe(delta.queue_seconds)
            if choice.cached_tokens is None:
                choice.cached_tokens = choice.cached_here
        metrics = self.service.metrics
        if tokens := len(delta.token_ids):
            if choice.last_token_at == 0.0:
                metrics.time_to_first_token.observe(now - self._begun)
            else:
                metrics.inter_token_latency.observe((now - choice.last_token_at) / tokens)
            choice.last_token_at = now
        if choice.finish is not None:
            self._unfinished -= 1
            self._count_end(choice, choice.finish.reason)

    def _count_end(self, choice: _Choice, reason: str) -> None:
        seconds = time.monotonic() - self._begun
        self.service.metrics.ended(reason, seconds, choice.prompt_tokens, choice.completion_tokens)


def _end(index: int, finish: Finish) -> Output:
    """Nothing but that a choice has ended."""
    return Output(index, "", [], None, finish, 0)


def _logprobs_of(logprobs: Logprobs | None, at: int) -> Logprobs | None:
    """Returns the logprobs of one of several tokens."""
    if logprobs is None:
        return None
    one = slice(at, at + 1)
    return Logprobs(logprobs.logprobs[one], logprobs.top_ids[one], logprobs.top_logprobs[one])
