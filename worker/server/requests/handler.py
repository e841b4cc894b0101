"""Runs one HTTP request, from token ids to text.

Each prompt has `n` choices. All choices of a request are numbered consecutively, prompt by prompt. Every generating
endpoint uses this module, so limits, stop strings, seeds, aborts and metrics are the same for all of them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field

import msgspec

from mla_router.worker.generation import FinishReason
from mla_router.worker.images import PlacedImage
from mla_router.worker.messages import Delta, Generate
from mla_router.worker.server.errors import (
    ENGINE_DIED,
    InternalError,
    InvalidField,
    Unavailable,
)
from mla_router.worker.server.ipc.mailbox import Mailbox, make_mailbox
from mla_router.worker.server.requests.accounting import RequestAccounting
from mla_router.worker.server.requests.backlog import check_backlog
from mla_router.worker.server.requests.choice import Choice, Finish, Output
from mla_router.worker.server.requests.identity import RequestIdentity
from mla_router.worker.server.requests.replay import HEADER, Marks, Origin, Replay
from mla_router.worker.server.requests.resume import resume
from mla_router.worker.server.requests.timing import Timing
from mla_router.worker.server.requests.usage import Usage
from mla_router.worker.server.schema.continuation import MAX_PROMPTS
from mla_router.worker.server.state import Service
from mla_router.worker.server.text.stop_regex import RegexMatcher
from mla_router.worker.server.text.stop_strings import StopMatcher
from mla_router.worker.server.validation.sampling import CheckedSampling, draw_seed
from mla_router.worker.server.validation.worker_limits import (
    check_priority,
    check_prompt_logprobs,
    fit,
)

_FAILURES = (FinishReason.REFUSED.value, FinishReason.LOST.value, FinishReason.ERROR.value)


@dataclass(slots=True)
class RequestHandler:
    """Submits the choices of one HTTP request to the scheduler and yields their outputs."""

    service: Service
    prompts: list[list[int]]
    prompt_field: str  # the client's field, for error messages
    sampling: CheckedSampling
    _: KW_ONLY
    default_max_tokens: int | None = None
    cache_key: str = ""
    name: str | list[str] | None = None  # the client's `rid`: one name, or one for each choice
    trace: str | None = None  # the client's X-Request-Id
    replay: Replay | None = None
    priority: int | None = None
    markers: frozenset[str] = frozenset()  # special tokens that stay in the text
    token_by_token: bool = False  # one output a token, even if several arrive together
    prediction: list[int] | None = None  # the answer that the client expects; None: not sent
    images: Sequence[list[PlacedImage]] = ()  # of each prompt; empty: none has any
    resumed: list[Output] = field(default_factory=list)  # outputs that the client already has
    origin: Origin = field(init=False)
    identity: RequestIdentity = field(init=False)
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)  # of this worker, never shown
    _missing: list[Output] = field(default_factory=list)  # ends that the client has not received
    _choices: list[Choice] = field(default_factory=list)
    _mailbox: Mailbox = field(init=False)
    _accounting: RequestAccounting = field(init=False)
    _unfinished: int = 0

    def __post_init__(self) -> None:
        self._mailbox = make_mailbox(
            self.sampling.stream_interval or self.service.config.stream_interval
        )
        if self.replay is not None and self.replay.origin is not None:
            self.origin = self.replay.origin
        else:
            seed = draw_seed(self.sampling.seed, self.service.config.random_seed)
            created, fingerprint = int(time.time()), self.service.fingerprint
            self.origin = Origin(bytes.fromhex(self._id), created, fingerprint, *seed)
        self.identity = RequestIdentity(self.origin, self.size, self.name, self.trace)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the request within the block. At the end of the block it aborts all choices that have not ended, because
        the client has disconnected or an error has occurred. Raises ApiError before anything runs."""
        service = self.service
        self._check()
        requests = self._requests()
        if self.replay is not None:
            self.resumed, self._missing = await resume(
                self.replay, self._choices, requests, token_by_token=self.token_by_token
            )
        names = self.identity.names([request.rid for request in requests])
        # A continued stream may return to this worker before the worker notices that the client of the first part has
        # gone.
        await service.names.add(names, replace=self.continues)
        self._accounting = RequestAccounting(service.metrics)
        try:
            for index, request in enumerate(requests):
                if self._choices[index].finish is None:
                    # Only the first choice of a prompt computes it; the others find it cached.
                    computes = index % self.sampling.n == 0
                    service.scheduler.submit(request, self._mailbox, index, computes=computes)
                    self._accounting.submitted()
                    self._unfinished += 1
            yield
        finally:
            service.names.remove(names)
            for choice in self._choices:
                if choice.finish is None:
                    service.scheduler.abort(choice.rid)
                    self._accounting.ended(choice, FinishReason.ABORT.value)

    async def next(self) -> list[Output]:
        """Returns the outputs since the last call, at least one; an empty list after the end of all choices.

        Raises ApiError if the scheduler could not run a choice.
        """
        outputs, self._missing = self._missing, []
        while not outputs and self._unfinished:
            arrived = await self._mailbox.take()
            now = time.monotonic()
            for index, delta in arrived:
                choice = self._choices[index]
                if choice.finish is None:  # else a stop string has ended it before this delta
                    outputs += self._take(choice, delta, now)
        return outputs

    @property
    def size(self) -> int:
        """The number of choices."""
        return len(self.prompts) * self.sampling.n

    @property
    def usage(self) -> Usage:
        """The token counts of all choices. Each prompt counts once, for any number of choices."""
        return Usage.of(
            sum(choice.prompt_tokens for choice in self._first_choices),
            sum(choice.completion_tokens for choice in self._choices),
            sum(choice.cached_tokens or 0 for choice in self._first_choices),
        )

    @property
    def accepted_prediction_tokens(self) -> int:
        """Tokens of the prediction that were accepted as drafts, of all choices."""
        limit = len(self.prediction or ())
        return sum(min(choice.accepted_drafts, limit) for choice in self._choices)

    def usage_of(self, index: int) -> Usage:
        choice = self._choices[index]
        return Usage.of(choice.prompt_tokens, choice.completion_tokens, choice.cached_tokens or 0)

    @property
    def timing(self) -> Timing | msgspec.UnsetType:
        """The durations of the request, with --enable-per-request-metrics."""
        if not self.service.config.enable_per_request_metrics:
            return msgspec.UNSET
        return self._accounting.timing(self._choices) or msgspec.UNSET

    @property
    def headers(self) -> dict[str, str]:
        """The headers for the router. It gets no cached tokens of a batch before all prompts have begun."""
        headers = {"x-mla-prompt-tokens": str(sum(c.prompt_tokens for c in self._first_choices))}
        cached = [c.cached_here for c in self._first_choices if c.cached_here is not None]
        if len(cached) == len(self.prompts):
            headers["x-mla-cached-tokens"] = str(sum(cached))
        if self.replay is not None:
            cached_tokens = [choice.cached_tokens for choice in self._choices]
            origin = msgspec.structs.replace(self.origin, cached_tokens=cached_tokens)
            headers[HEADER] = origin.encode()
        return headers

    @property
    def continues(self) -> bool:
        """Whether this is the continuation of a broken stream."""
        return self.replay is not None and self.replay.origin is not None

    @property
    def known(self) -> list[int]:
        """The choices of which the client has received a part already."""
        choices = [] if self.replay is None else self.replay.choices
        return [
            index
            for index, choice in enumerate(choices)
            if choice.token_ids or choice.finish_reason
        ]

    def marks(self) -> Marks:
        return Marks(wanted=self.replay is not None)

    @property
    def _first_choices(self) -> list[Choice]:
        """The first choice of each prompt."""
        return self._choices[:: self.sampling.n]

    def _take(self, choice: Choice, delta: Delta, now: float) -> list[Output]:
        if delta.finish_reason in _FAILURES:
            self._fail(choice, delta)
        choice.accepted_drafts = delta.accepted
        outputs = choice.outputs_of(delta, token_by_token=self.token_by_token)
        self._accounting.received(choice, delta, now)
        if choice.finish is not None:
            if not delta.finish_reason:  # the scheduler does not look at text
                self.service.scheduler.abort(choice.rid)
            self._unfinished -= 1
            self._accounting.ended(choice, choice.finish.reason)
        return outputs

    def _fail(self, choice: Choice, delta: Delta) -> None:
        """Raises the error that `delta` reports."""
        reason = delta.finish_reason
        choice.finish = Finish(reason)  # the scheduler has ended it: nothing to abort
        self._accounting.ended(choice, reason)
        if reason == FinishReason.REFUSED.value:
            assert self.sampling.constraint is not None, "only a grammar is refused this late"
            raise self.sampling.constraint.refused(delta.error)
        if reason == FinishReason.LOST.value:
            raise Unavailable(delta.error, code=ENGINE_DIED, retry_after=1)
        raise InternalError(delta.error or "The scheduler could not run this request")

    def _check(self) -> None:
        """Raises ApiError if the worker cannot take the request."""
        service, sampling, config = self.service, self.sampling, self.service.config
        if sampling.constraint is not None and config.grammar_backend == "none":
            raise sampling.constraint.refused("this worker runs with --grammar-backend none")
        check_priority(self.priority, enabled=config.enable_priority_scheduling)
        if self.size > MAX_PROMPTS:
            raise InvalidField(
                "n",
                f"{sampling.n} answers to each of {len(self.prompts)} prompts are more than "
                f"{MAX_PROMPTS}",
            )
        check_backlog(config, service.limits, service.scheduler, self.size)
        if self.replay is not None:
            self.replay.check(self.size, service.limits.vocab_size)
        lengths = list(map(len, self.prompts))
        check_prompt_logprobs(sampling.params, lengths * sampling.n, self.prompt_field)

    def _requests(self) -> list[Generate]:
        """Makes the choices, and returns their requests to the scheduler. Raises ApiError for a prompt that is too long."""
        service, sampling = self.service, self.sampling
        requests = []
        for index in range(self.size):
            prompt = self.prompts[index // sampling.n]
            rid = self._id if self.size == 1 else f"{self._id}-{index}"
            max_tokens = fit(
                sampling, len(prompt), service.limits, self.default_max_tokens, self.prompt_field
            )
            self._choices.append(self._choice(index, rid, len(prompt), max_tokens))
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
                    images=self.images[index // sampling.n] if self.images else [],
                    prediction=self.prediction or [],
                )
            )
        return requests

    def _choice(self, index: int, rid: str, prompt_tokens: int, max_tokens: int) -> Choice:
        sampling = self.sampling
        return Choice(
            index,
            rid,
            prompt_tokens,
            max_tokens,
            self.service.tokenizer.detokenizer(
                skip_special_tokens=sampling.skip_special_tokens, shown=self.markers
            ),
            StopMatcher(sampling.stop, keep=sampling.keep_stop),
            RegexMatcher(sampling.stop_regex) if sampling.stop_regex else None,
            sampling.params.stop_token_ids,
            sampling.keep_stop,
        )
