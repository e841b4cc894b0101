"""The running of one HTTP request's prompts, from token ids to text.

Every generating endpoint goes through here, so limits, stop strings, seeds, aborts and metrics are
the same for all; the endpoints only give the output its shape.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from mla_router.worker.core import FinishReason
from mla_router.worker.messages import Delta, Generate
from mla_router.worker.server.detokenizer import Detokenizer
from mla_router.worker.server.errors import InternalError, InvalidRequest, TooManyRequests
from mla_router.worker.server.sampling import Sampling, draw_seed, fit
from mla_router.worker.server.scheduler_client import Mailbox
from mla_router.worker.server.state import Service
from mla_router.worker.server.stop_strings import StopMatcher
from mla_router.worker.server.usage import Usage

MAX_SALT_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str  # a FinishReason value
    matched: str | int | None = None  # the stop string or token, if one ended it


@dataclass(frozen=True, slots=True)
class Output:
    """What is new of one prompt's answer."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish: Finish | None
    shown: int  # of the tokens, how many are part of the text: a stop token at the end is not

    @property
    def shown_ids(self) -> list[int]:
        return self.token_ids[: self.shown]

    @property
    def shown_logprobs(self) -> list[float]:
        return (self.logprobs or [])[: self.shown]


@dataclass(slots=True)
class _Choice:
    """One prompt and how far its answer has got."""

    rid: str
    prompt_tokens: int
    max_tokens: int
    detokenizer: Detokenizer
    matcher: StopMatcher
    completion_tokens: int = 0
    cached_tokens: int | None = None  # known from the first delta on
    finish: Finish | None = None
    last_token_at: float = 0.0


@dataclass(slots=True)
class Generation:
    """One HTTP request's prompts and what has come of them so far."""

    service: Service
    prompts: list[list[int]]
    sampling: Sampling
    default_max_tokens: int | None = None
    cache_salt: str | None = None
    name: str | None = None  # the client's own name for it, to abort it by
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _choices: list[_Choice] = field(default_factory=list)
    _mailbox: Mailbox = field(default_factory=Mailbox)
    _unfinished: int = 0
    _begun: float = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Whatever still runs at the end of the block gets aborted, whether the client has gone,
        an error came up, or a sibling failed."""
        service = self.service
        requests = self._check()
        service.names.add(self._names, [request.rid for request in requests])
        self._begun = time.monotonic()
        self._unfinished = len(requests)
        try:
            for index, request in enumerate(requests):
                service.scheduler.submit(request, self._mailbox, index)
                service.metrics.requests.inc()
            yield
        finally:
            service.names.remove(self._names)
            for choice in self._choices:
                if choice.finish is None:
                    service.scheduler.abort(choice.rid)
                    service.metrics.aborted.inc()

    @property
    def usage(self) -> Usage:
        return Usage.of(
            sum(choice.prompt_tokens for choice in self._choices),
            sum(choice.completion_tokens for choice in self._choices),
            sum(choice.cached_tokens or 0 for choice in self._choices),
        )

    def rid_of(self, index: int) -> str:
        """What the client knows a prompt by."""
        name = self.name or self.id
        return name if len(self.prompts) == 1 else f"{name}-{index}"

    def usage_of(self, index: int) -> Usage:
        choice = self._choices[index]
        return Usage.of(choice.prompt_tokens, choice.completion_tokens, choice.cached_tokens or 0)

    @property
    def headers(self) -> dict[str, str]:
        """What the router learns from, sent with the first byte. The cached tokens of a batch are
        left out until all its prompts have begun."""
        headers = {"x-mla-prompt-tokens": str(sum(c.prompt_tokens for c in self._choices))}
        cached = [c.cached_tokens for c in self._choices if c.cached_tokens is not None]
        if len(cached) == len(self._choices):
            headers["x-mla-cached-tokens"] = str(sum(cached))
        return headers

    async def next(self) -> list[Output]:
        """What has come since the last call; an empty list when all prompts have finished."""
        outputs: list[Output] = []
        while not outputs and self._unfinished:
            now = 0.0
            for index, delta in await self._mailbox.take():
                now = now or time.monotonic()
                choice = self._choices[index]
                if choice.finish is None:  # else a stop string has ended it before this delta
                    outputs.append(self._advance(choice, index, delta, now))
        return outputs

    @property
    def _names(self) -> list[str]:
        return [self.id] if self.name is None else [self.id, self.name]

    # -- inside ----------------------------------------------------------------------------------

    def _check(self) -> list[Generate]:
        """Refuse what cannot be run, before anything of it runs."""
        service, sampling, config = self.service, self.sampling, self.service.config
        limits = service.limits
        if len(self.cache_salt or "") > MAX_SALT_LENGTH:
            raise InvalidRequest(
                f"cache_salt: at most {MAX_SALT_LENGTH} characters", param="cache_salt"
            )
        room = config.max_queued_requests + limits.max_running_requests
        if service.scheduler.open_requests + len(self.prompts) > room:
            raise TooManyRequests(
                f"{service.scheduler.open_requests} requests are running or waiting; try later",
                code="queue_full",
                retry_after=1,
            )
        stop_ids = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stop_ids = stop_ids | service.tokenizer.eos_ids
        requests = []
        for index, prompt in enumerate(self.prompts):
            rid = self.id if len(self.prompts) == 1 else f"{self.id}-{index}"
            max_tokens = fit(sampling, len(prompt), limits, self.default_max_tokens)
            self._choices.append(
                _Choice(
                    rid,
                    len(prompt),
                    max_tokens,
                    service.tokenizer.detokenizer(),
                    StopMatcher(sampling.stop),
                )
            )
            requests.append(
                Generate(
                    rid=rid,
                    token_ids=prompt,
                    max_tokens=max_tokens,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    seed=draw_seed(config.random_seed) if sampling.seed is None else sampling.seed,
                    stop_token_ids=sorted(stop_ids),
                    logprobs=sampling.logprobs,
                    cache_salt=self.cache_salt or "",
                )
            )
        return requests

    def _advance(self, choice: _Choice, index: int, delta: Delta, now: float) -> Output:
        if delta.finish_reason == "error":
            choice.finish = Finish("error")  # the scheduler has ended it: nothing to abort
            raise InternalError(delta.error or "The scheduler could not run this request")
        if choice.cached_tokens is None:
            choice.cached_tokens = delta.cached_tokens
        tokens = delta.token_ids
        self._observe(choice, len(tokens), now)
        choice.completion_tokens += len(tokens)

        matched: str | int | None = None
        shown = tokens
        if delta.finish_reason == FinishReason.STOP.value and tokens:
            matched, shown = tokens[-1], tokens[:-1]  # the stop token is no part of the text
        text = choice.matcher.push(choice.detokenizer.push(shown))
        if delta.finish_reason:
            text += choice.matcher.push(choice.detokenizer.flush()) + choice.matcher.flush()
            choice.finish = Finish(delta.finish_reason, matched)
        if choice.matcher.matched is not None:
            choice.finish = Finish(FinishReason.STOP.value, choice.matcher.matched)
            self.service.scheduler.abort(choice.rid)  # it knows nothing of stop strings

        if choice.finish is not None:
            self._unfinished -= 1
            self.service.metrics.e2e_latency.observe(now - self._begun)
        return Output(index, text, tokens, delta.logprobs, choice.finish, len(shown))

    def _observe(self, choice: _Choice, tokens: int, now: float) -> None:
        if tokens:
            metrics = self.service.metrics
            if choice.last_token_at == 0.0:
                metrics.time_to_first_token.observe(now - self._begun)
            else:
                metrics.inter_token_latency.observe((now - choice.last_token_at) / tokens)
            choice.last_token_at = now
