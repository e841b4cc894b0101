"""The step loop: one thread that keeps the device busy.

A step has three phases on the host, and the overlap loop lays them so that all of its own work
happens while the device computes (the order is DeepInfer's):

    forward(N)          launch; input tokens of running requests are already on the device
    postprocess(N-1)    under forward(N): wait for the tokens of the step before, tell the server
    sample(N)           launch; by now everything up to step N-1 is known
    schedule(N+1)       plain integers

`normal_loop` is the same four phases without overlap, and gives the same tokens. The price of
overlap is that a request that ends by a stop token is in one more step, whose token is dropped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mla_router.worker.core import (
    Admitted,
    FinishReason,
    PendingStep,
    Scores,
    StepEngine,
    StepPlan,
)
from mla_router.worker.messages import (
    Abort,
    Delta,
    Deltas,
    FlushCache,
    Generate,
    GetStats,
    Shutdown,
    Stats,
    ToScheduler,
)
from mla_router.worker.scheduler.admission import Admission
from mla_router.worker.scheduler.channel import Channel
from mla_router.worker.scheduler.memory import Memory
from mla_router.worker.scheduler.request import Request, State

HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan and the requests it names: those that compute prompt tokens, and those that sample."""

    plan: StepPlan
    prefills: list[Request]
    sampled: list[Request]  # aligned with plan.sampled_slots


@dataclass(frozen=True, slots=True)
class InFlight:
    step: ScheduledStep
    pending: PendingStep


class Scheduler:
    """All requests of one worker, from `Generate` to the last `Delta`."""

    def __init__(
        self,
        engine: StepEngine[Any],
        channel: Channel,
        *,
        chunk_size: int,
        use_prefix_cache: bool = True,
        vocab_size: int,
    ) -> None:
        self.engine = engine
        self.channel = channel
        self.vocab_size = vocab_size
        self.memory = Memory(engine.capacity, use_prefix_cache=use_prefix_cache)
        self.admission = Admission(self.memory, chunk_size)
        self.requests: dict[str, Request] = {}  # live or not yet released
        self.decoding: list[Request] = []
        self.stopping = False
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self._deltas: list[Delta] = []
        self._next_heartbeat = 0.0

    # -- the two loops --------------------------------------------------------------------------

    def overlap_loop(self) -> None:
        last: InFlight | None = None
        while not self.stopping:
            self.receive(in_flight=last is not None)
            step = self.schedule()
            launched = self.engine.forward(step.plan) if step else None
            if last is not None:
                self.postprocess(last)
            last = None
            if step is not None and launched is not None:
                last = InFlight(step, self.engine.sample(launched))

    def normal_loop(self) -> None:
        while not self.stopping:
            self.receive(in_flight=False)
            step = self.schedule()
            if step is not None:
                launched = self.engine.forward(step.plan)
                self.postprocess(InFlight(step, self.engine.sample(launched)))

    # -- what comes in --------------------------------------------------------------------------

    def receive(self, *, in_flight: bool) -> None:
        """Take in what has arrived. With nothing to do, sleep until something does."""
        self._send_deltas()
        idle = not in_flight and not self.requests
        if (now := time.monotonic()) >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_S
            self.channel.send(self.stats())
        for message in self.channel.receive(self._next_heartbeat - now if idle else 0.0):
            self._handle(message)

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case Generate():
                self._add(message)
            case Abort(rid):
                if request := self.requests.get(rid):
                    self._abort(request)
            case GetStats(query):
                self.channel.send(self.stats(query))
            case FlushCache(query):
                self.memory.flush_cache()
                self.channel.send(self.stats(query))
            case Shutdown():
                self.stopping = True

    def _add(self, message: Generate) -> None:
        """Accept a request. The server has checked it; what would break a step is checked again,
        because a step is shared by everybody."""
        sampling, tokens = message.sampling, message.prompt + message.output
        problem = ""
        if message.rid in self.requests:
            problem = "a request with this id is running"
        elif not message.prompt or not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            problem = f"token ids must be in 0 .. {self.vocab_size - 1}, and at least one"
        elif sampling.max_tokens < 1 or not self.memory.can_ever_fit(
            len(message.prompt), sampling.max_tokens
        ):
            problem = f"{len(message.prompt)} + {sampling.max_tokens} tokens can never fit"
        elif len(message.output) >= sampling.max_tokens:
            problem = f"there are {len(message.output)} of {sampling.max_tokens} tokens already"
        if problem:
            self._deltas.append(Delta(message.rid, [], finish_reason="error", error=problem))
            return
        request = Request(
            message.rid,
            message.prompt,
            sampling,
            output=message.output,
            cache_salt=message.cache_salt,
        )
        self.requests[request.rid] = request
        self.admission.waiting.append(request)

    def _abort(self, request: Request) -> None:
        if not request.is_live:
            return
        if request.state is State.WAITING:
            self.admission.waiting.remove(request)
        request.finish(FinishReason.ABORT)
        self._tell(request, [], None)
        self._give_back([request])

    # -- schedule(N+1) --------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step from integers the host has: no result of a launched step is needed."""
        decodes = [request for request in self.decoding if request.wants_decode]
        writes: list[tuple[int, int, int]] = []
        lengths = []
        for request in decodes:
            lengths.append(request.take_decode())
            writes += self.memory.grow(request, lengths[-1])
        shares, admitted = self.admission.next_prefills()
        for request in admitted:
            writes += [(request.slot, i, page) for i, page in enumerate(request.pages)]
            self.num_prompt_tokens += len(request.context)
            self.num_cached_tokens += request.num_cached
        chunks = []
        for request, tokens in shares:
            chunks.append(request.take_chunk(tokens))
            writes += self.memory.grow(request, request.launched_prompt)
        if not decodes and not chunks:
            return None
        plan = StepPlan(
            decode_slots=tuple(request.slot for request in decodes),
            decode_lengths=tuple(lengths),
            chunks=tuple(chunks),
            page_writes=tuple(writes),
            admitted=tuple(
                Admitted(r.slot, r.sampling, r.prompt, r.context[len(r.prompt) :]) for r in admitted
            ),
        )
        prefills = [request for request, _ in shares]
        started = [request for request in prefills if request.state is State.DECODE]
        self.decoding += started
        for request in [*prefills, *decodes]:
            request.steps_in_flight += 1
        self.num_steps += 1
        return ScheduledStep(plan, prefills, decodes + started)

    # -- postprocess(N-1) -----------------------------------------------------------------------

    def postprocess(self, last: InFlight) -> None:
        """Settle a launched step: append its tokens, find who ended, give back what is unused."""
        step, result = last.step, last.pending.wait()
        for request, chunk in zip(step.prefills, step.plan.chunks, strict=True):
            request.settled_length = chunk.start + len(chunk.tokens)
            if request.is_live:
                self.memory.share(request)
        decodes = step.sampled[: len(step.plan.decode_slots)]  # they come first
        for request, length in zip(decodes, step.plan.decode_lengths, strict=True):
            request.settled_length = length
        for i, request in enumerate(step.sampled):
            if not request.is_live:
                continue  # it ended while this step was under way
            token = result.tokens[i]
            request.output.append(token)
            self.num_generated_tokens += 1
            if token in request.sampling.stop_token_ids:
                request.finish(FinishReason.STOP)
            elif len(request.output) == request.sampling.max_tokens:
                request.finish(FinishReason.LENGTH)
            scores = result.scores[i] if result.scores and request.sampling.logprobs else None
            self._tell(request, [token], scores)
        for request in [*step.prefills, *decodes]:
            request.steps_in_flight -= 1
        self._give_back([*step.prefills, *decodes])

    def _give_back(self, touched: list[Request]) -> None:
        """Release those of `touched` that have ended and that no launched step names."""
        self.admission.settle()
        ended = [request for request in touched if not request.is_live]
        if ended:
            self.decoding = [request for request in self.decoding if request.is_live]
        for request in ended:
            if request.steps_in_flight == 0:
                self.memory.release(request)
                del self.requests[request.rid]

    # -- what goes out --------------------------------------------------------------------------

    def _tell(self, request: Request, tokens: list[int], scores: Scores | None) -> None:
        reason = request.finish_reason.value if request.finish_reason else ""
        self._deltas.append(Delta(request.rid, tokens, scores, request.num_cached, reason))

    def _send_deltas(self) -> None:
        if self._deltas:
            self.channel.send(Deltas(self._deltas))
            self._deltas = []

    def stats(self, query: int = 0) -> Stats:
        waiting = len(self.admission.waiting)
        return Stats(
            query=query,
            running=len(self.requests) - waiting,
            waiting=waiting,
            total_pages=self.memory.capacity.num_pages,
            free_pages=self.memory.allocator.num_free,
            cached_pages=self.memory.cache.num_evictable,
            total_slots=self.memory.capacity.num_slots,
            free_slots=len(self.memory.free_slots),
            steps=self.num_steps,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            generated_tokens=self.num_generated_tokens,
        )
