"""The requests of a worker that have not ended."""

from __future__ import annotations

import itertools

from mla_router.worker.generation import FinishReason, Logprobs
from mla_router.worker.grammar.errors import Problem
from mla_router.worker.messages import Generate
from mla_router.worker.scheduler.grammars import GrammarRequests
from mla_router.worker.scheduler.images import ImageRequests
from mla_router.worker.scheduler.outbox import Outbox
from mla_router.worker.scheduler.planner import Planner
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.step.result import NO_TOKEN


class OpenRequests(dict[str, Request]):
    """Requests by rid, from their `Generate` to their last `Delta`.

    A request first waits for its images, then for its grammar, and then belongs to the planner.
    """

    def __init__(
        self,
        planner: Planner,
        outbox: Outbox,
        grammars: GrammarRequests,
        images: ImageRequests,
        *,
        vocab_size: int,
    ) -> None:
        super().__init__()
        self.num_generated_tokens = 0
        self._planner = planner
        self._outbox = outbox
        self._grammars = grammars
        self._images = images
        self._vocab_size = vocab_size
        self._arrivals = itertools.count()

    def add(self, message: Generate) -> None:
        """Accepts or rejects a request."""
        if problem := self._problem(message):
            self._outbox.reject(message, problem)
            return
        request = Request(
            message,
            arrival=next(self._arrivals),
            priority=message.priority if self._planner.by_priority else 0,
            tokens_per_row=self._planner.memory.capacity.tokens_per_row,
        )
        self[request.rid] = request
        if request.images:
            self._images.add(request)
        elif request.grammar is None:
            self._planner.waiting.add(request)
        else:
            self._grammars.add(request)

    def _problem(self, message: Generate) -> str:
        """Returns the reason to reject a request, or nothing. The server has validated it, but fields that could break a
        step are checked again: a failed step ends all of its requests."""
        sampling, memory = message.sampling, self._planner.memory
        tokens = message.prompt + message.output + message.prediction
        if message.rid in self:
            return "a request with this id is running"
        if message.images and not self._images.can_take(message):
            return "these images do not fit the prompt or the model"
        if not message.prompt or not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            return f"token ids must be in 0 .. {self._vocab_size - 1}, and at least one"
        length = len(message.prompt)
        if sampling.max_tokens < 1 or not memory.can_ever_fit(length, sampling.max_tokens):
            return f"{length} + {sampling.max_tokens} tokens can never fit"
        if len(message.output) >= sampling.max_tokens:
            return f"there are {len(message.output)} of {sampling.max_tokens} tokens already"
        if message.grammar is not None and not self._grammars.is_available:
            return "this worker has no grammars"
        return ""

    def pass_on(self, request: Request) -> None:
        """Passes on a request whose images are encoded: to its grammar, or else to the planner."""
        if request.grammar is None:
            request.move_to(State.WAITING)
            self._planner.waiting.add(request)
        else:
            request.move_to(State.COMPILING)
            self._grammars.add(request)

    def append(self, request: Request, tokens: list[int], logprobs: Logprobs | None) -> None:
        """Appends `tokens`, up to the token that ends the answer, and sends them to the server."""
        for at, token in enumerate(tokens):
            if token == NO_TOKEN:
                some = logprobs.first(at) if logprobs and at else None
                problem = "no token could be drawn for this request"
                self.end(request, FinishReason.ERROR, problem, tokens=tokens[:at], logprobs=some)
                return
            request.add_token(token)
            self.num_generated_tokens += 1
            if token in request.sampling.stop_token_ids or self._grammars.ends(request, token):
                reason = FinishReason.STOP
            elif len(request.output) == request.max_tokens:
                reason = FinishReason.LENGTH
            else:
                continue
            some = logprobs.first(at + 1) if logprobs else None
            self.end(request, reason, tokens=tokens[: at + 1], logprobs=some)
            return
        if tokens:
            self._outbox.add(request, tokens, logprobs)

    def end(
        self,
        request: Request,
        reason: FinishReason,
        error: str = "",
        *,
        tokens: list[int] | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        """Ends a request: sends its last tokens to the server, and frees its slot and pages."""
        was_planned = request.is_planned
        request.finish(reason)
        self._outbox.add(request, tokens or [], logprobs, error)
        self._grammars.remove(request)
        self._images.remove(request)
        if was_planned:
            self._planner.remove(request)
        del self[request.rid]

    def end_without_masks(self, request: Request, problem: Problem) -> None:
        """Ends a request whose grammar gives no token bitmasks."""
        reason = FinishReason.REFUSED if problem.is_of_grammar else FinishReason.LOST
        self.end(request, reason, problem.reason)
