"""The step loop: one thread that keeps the device busy.

A step has four phases on the host. The overlap loop orders them so that the host works while the device computes:

    forward(N)          launch; the input tokens of running requests are already on the device
    postprocess(N-1)    during forward(N): wait for the tokens of the previous step, send them to the server
    sample(N)           launch; all results up to step N-1 are known now
    schedule(N+1)       host integers only

A step without token bitmasks does not depend on step N-1: its sampling is launched right after its forward pass.
`normal_loop` has the same four phases without overlap, and gives the same tokens. With overlap, a request that ends by a
stop token is in one more step, whose token is dropped.

With DP attention several schedulers launch their steps together. They agree on a step when each has planned its own
(`lockstep.py`).
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import Any

from mla_router.worker.config import WorkerConfig
from mla_router.worker.generation import FinishReason
from mla_router.worker.grammar.pool import GrammarPool
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.messages import (
    Abort,
    FlushCache,
    Generate,
    GetStats,
    RecordExperts,
    Shutdown,
    StartProfile,
    Stats,
    StopProfile,
    ToScheduler,
)
from mla_router.worker.scheduler.channel import Channel
from mla_router.worker.scheduler.drafts import DraftCounts
from mla_router.worker.scheduler.expert_recorder import ExpertRecorder, Load
from mla_router.worker.scheduler.grammars import GrammarRequests
from mla_router.worker.scheduler.images import SHARE, ImageRequests
from mla_router.worker.scheduler.lockstep import Alone, StepGroup
from mla_router.worker.scheduler.memory import Memory
from mla_router.worker.scheduler.open_requests import OpenRequests
from mla_router.worker.scheduler.outbox import Outbox
from mla_router.worker.scheduler.planner import Planner
from mla_router.worker.scheduler.profiler import Profiler
from mla_router.worker.scheduler.step import Step
from mla_router.worker.step.engine import StepEngine
from mla_router.worker.step.plan import TokenMasks
from mla_router.worker.step.result import StepResult

logger = logging.getLogger(__name__)

STATS_S = 0.5  # between two periodic statistics; also the longest sleep
PREPARE_POLL_S = 0.002  # sleep of a scheduler that only waits for grammars or images
# After this many failed steps in a row the fault is not in one batch.
MAX_FAILURES = 3


class EngineFailed(Exception):
    """Loss of the device for this process. A new process may be able to use it."""


class Scheduler:
    """Runs all requests of one worker, from `Generate` to the last `Delta`."""

    def __init__(
        self,
        engine: StepEngine[Any],
        channel: Channel,
        config: WorkerConfig,
        *,
        vocab_size: int,
        grammars: GrammarPool | None = None,
        heartbeat: Heartbeat | None = None,
        expert_load: Load | None = None,
        group: StepGroup | None = None,
    ) -> None:
        """`group`: the schedulers of other DP ranks; by default none."""
        self.engine = engine
        self.group = group or Alone()
        self.channel = channel
        self.outbox = Outbox(channel)
        self.profiler = Profiler.from_config(config)
        self.expert_recorder = ExpertRecorder.from_config(config, expert_load)
        self.memory = Memory(engine.capacity, use_prefix_cache=not config.disable_radix_cache)
        self.planner = Planner(self.memory, config)
        self.grammars = GrammarRequests(grammars)
        self.images = ImageRequests(engine)
        self.requests = OpenRequests(
            self.planner, self.outbox, self.grammars, self.images, vocab_size=vocab_size
        )
        self.heartbeat = heartbeat or Heartbeat.create()
        self.stopping = False
        self.draft_counts = DraftCounts()
        self._failures = 0  # failed steps since the last successful one
        self._next_stats = 0.0
        self._step_s = 0.0  # predicted seconds of the last step
        # Seconds of all steps, and those in which this thread waited for their results
        self._steps_s = self._wait_s = 0.0

    # -- the two loops --------------------------------------------------------------------------

    def overlap_loop(self) -> None:
        """Runs until `Shutdown`. Raises EngineFailed."""
        last: Step | None = None
        while not (self.stopping and self.group.may_leave()):
            self.receive(in_flight=last is not None)
            step = self.forward(self.next_step())
            if last is not None:
                self.postprocess(last)
            last = self.sample(step)

    def normal_loop(self) -> None:
        """Runs until `Shutdown`. Raises EngineFailed."""
        while not (self.stopping and self.group.may_leave()):
            self.receive(in_flight=False)
            step = self.sample(self.forward(self.next_step()))
            if step is not None:
                self.postprocess(step)

    def next_step(self) -> Step | None:
        """Plans the next step of this scheduler, and waits for those of its group. Returns None if there is none."""
        drafts = self.planner.drafts
        step = self.group.join(self.planner.next_step(), drafts.take_outcome())
        drafts.agree(self.group.outcomes)
        return step

    # -- messages -------------------------------------------------------------------------------

    def receive(self, *, in_flight: bool) -> None:
        """Handles all messages that have arrived. An idle scheduler sleeps until a message arrives, or another DP rank has
        a step."""
        self.outbox.flush()
        if self.profiler.is_recording:
            with self.heartbeat.paused():
                self.profiler.tick(self.planner.num_steps)
        self.report_progress()
        idle = not in_flight and not self.requests
        if idle:
            self.planner.estimate.idle()
        # No message announces a compiled grammar or an encoded image: poll soon if there is nothing else to do.
        preparing = self.grammars.num_compiling + len(self.images)
        only_preparing = not in_flight and len(self.requests) == preparing
        timeout = STATS_S if idle else PREPARE_POLL_S if only_preparing else 0.0
        if timeout and self.group.is_awaited:
            timeout = 0.0
        for message in self.channel.receive(timeout):
            self._handle(message)
        if self.images:
            # In front of the next step. Without steps nobody waits for a piece
            self._encode_images(math.inf if only_preparing else SHARE * self._step_s)
        for request, problem in self.grammars.poll():
            if problem is None:
                self.planner.waiting.add(request)
            else:
                self.requests.end_without_masks(request, problem)

    def _encode_images(self, seconds: float) -> None:
        """Launches up to `seconds` of the vision tower, and passes on the requests whose images are encoded."""
        try:
            with self.heartbeat.paused():
                ready = self.images.advance(seconds)
        except Exception as error:  # noqa: BLE001 (other images may not have the same error)
            self._count_failure(error)
            for request in self.images.fail():
                self.requests.end(request, FinishReason.ERROR, "its images could not be encoded")
            return
        for request in ready:
            self.requests.pass_on(request)

    def report_progress(self) -> None:
        """Updates the heartbeat: before each step, and within the steps of a CPU. Sends `Stats` when they are due."""
        self.heartbeat.update(has_work=bool(self.requests))
        if (now := time.monotonic()) >= self._next_stats:
            self._next_stats = now + STATS_S
            self.channel.send(self.stats())

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case Generate():
                self.requests.add(message)
            case Abort(rid):
                if request := self.requests.get(rid):
                    self.requests.end(request, FinishReason.ABORT)
            case GetStats(query, server):
                self.channel.send(self.stats(query), server)
            case FlushCache(query, server):
                self.memory.flush_cache()
                self.channel.send(self.stats(query), server)
            case StartProfile() | StopProfile():
                with self.heartbeat.paused():
                    answer = self.profiler.answer(message, self.planner.num_steps)
                self.channel.send(answer, message.server)
            case RecordExperts():
                with self.heartbeat.paused():
                    answer = self.expert_recorder.answer(message)
                self.channel.send(answer, message.server)
            case Shutdown():
                self.stopping = True
                for request in list(self.requests.values()):
                    self.requests.end(request, FinishReason.ABORT)

    # -- forward(N), sample(N) ------------------------------------------------------------------

    def forward(self, step: Step | None) -> Step | None:
        """Launches the forward pass, and the sampling if it needs no token bitmasks. Returns the step, or None if there
        is none or its launch failed."""
        # With overlap, the previous step is still in flight.
        before, self._step_s = self._step_s, 0.0
        tower_s = self.images.take_launched_s()
        if step is None:
            return None
        self._step_s, step.tower_s = step.predicted_s, tower_s
        self.heartbeat.expect(before + self._step_s)
        try:
            step.forward_output = self.engine.forward(step.plan)
            if not step.needs_masks:
                self._sample(step, None)
        except Exception as error:  # noqa: BLE001 (other steps may not have the same error)
            self._fail(step, error)
            return None
        return step

    def sample(self, step: Step | None) -> Step | None:
        """Launches the sampling if `forward` has not. Returns the step, or None as `forward`."""
        if step is None or step.pending is not None:
            return step
        try:
            with self.heartbeat.paused():
                masked = self.grammars.masks(step)
            self._sample(step, masked.masks)
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(step, error)
            return None
        for request, limit in masked.limits:
            step.mask_limits[request] = limit
            request.limit_decode(limit)
        for request, problem in masked.stuck:
            self.requests.end_without_masks(request, problem)
        for request, run in masked.forced:
            step.forced_tokens[request] = self.planner.jump(request, run)
        return step

    def _sample(self, step: Step, masks: TokenMasks | None) -> None:
        step.pending = self.engine.sample(step.forward_output, masks)
        # Its logits are large, and the next step is launched before this one ends
        step.forward_output = None

    # -- postprocess(N-1) -----------------------------------------------------------------------

    def postprocess(self, step: Step) -> None:
        """Waits for the results of a step, appends its tokens, ends finished requests and frees their memory."""
        assert step.pending is not None
        try:
            began = time.perf_counter()
            result = step.pending.wait()
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(step, error)
            return
        self._wait_s += time.perf_counter() - began
        self._steps_s += result.seconds or 0.0
        self._failures = 0
        if result.seconds is not None and step.tower_s:
            result = replace(result, seconds=max(result.seconds - step.tower_s, 0.0))
        if result.seconds is not None and step.is_typical:
            self.planner.step_time.learn(step.plan, result.seconds)
        self.planner.drafts.learn(step, result)
        self._count_computed(step, result)
        for i, (request, tokens) in enumerate(zip(step.sampled, result.tokens, strict=True)):
            if request.finish_reason is not None:
                continue  # it ended while this step was in flight
            if step.forced_tokens:
                tokens = [*tokens, *step.forced_tokens.get(request, ())]
            logprobs = result.logprobs[i] if result.logprobs and request.sampling.logprobs else None
            self.requests.append(request, tokens, logprobs)
        for request in step.prefills:
            if request.is_running:
                self.memory.share(request)
        if self.memory.windows is not None:
            for request in (*step.prefills, *step.decodes):
                if request.is_running:
                    self.memory.leave_window(request)
        self.planner.admission.remove_computed()
        if step.needs_masks:
            self._keep_drafts(step)

    def _keep_drafts(self, step: Step) -> None:
        """Gets the drafts that a step has made for requests with a grammar: their bitmasks of the next step depend on
        them."""
        drafts = None
        if step.plan.returns_drafts:
            assert step.pending is not None
            try:
                drafts = step.pending.drafts()
            except Exception as error:  # noqa: BLE001 (as above)
                self._fail(step, error)
        self.grammars.keep_drafts(step, drafts)

    def _count_computed(self, step: Step, result: StepResult) -> None:
        """Counts the computed tokens of the requests in `step`, and keeps the logprobs of their prompt tokens."""
        logprobs = result.prompt_logprobs or [None] * len(step.prefills)
        for request, chunk, some in zip(step.prefills, step.plan.chunks, logprobs, strict=True):
            if request.is_live:
                request.computed_length = chunk.start + len(chunk.tokens)
                if request.prompt_logprobs is not None:
                    request.prompt_logprobs.add(chunk, some)
        for request, tokens in zip(step.decodes, result.tokens, strict=False):
            given, limit = len(tokens), step.token_limit(request)
            request.computed_length += given
            if limit > 1:
                request.take_back(given, limit)
            if step.plan.num_drafts and request.is_live:
                proposed = step.plan.rows_per_decode - 1
                self.draft_counts.count(proposed=proposed, accepted=given - 1)
                request.accepted += max(0, given - 1)

    # -- failures -------------------------------------------------------------------------------

    def _fail(self, step: Step, error: Exception) -> None:
        """Ends the requests of a failed step, and no others.

        They get a 500, which the router retries a few times only. After a 503 it would try every worker, and one of these
        requests may have caused the failure.

        Raises EngineFailed if later steps would fail as well. All open requests then end with this process, and the
        router can send them to another worker.
        """
        self._count_failure(error)
        for request in [*step.prefills, *step.decodes]:
            if request.is_live:
                self.requests.end(
                    request, FinishReason.ERROR, "the step that computed this request failed"
                )

    def _count_failure(self, error: Exception) -> None:
        """Logs a failed step or batch of images. Raises EngineFailed if later ones would fail as well."""
        self._failures += 1
        logger.error("step %d failed", self.planner.num_steps, exc_info=error)
        if not self.engine.is_usable_after(error):
            raise EngineFailed("no later step can succeed") from error
        if self._failures == MAX_FAILURES:
            raise EngineFailed(f"{MAX_FAILURES} steps in a row have failed") from error

    # -- statistics -----------------------------------------------------------------------------

    def stats(self, query: int = 0) -> Stats:
        return Stats(
            query=query,
            running=len(self.planner.running),
            waiting=len(self.planner.waiting) + len(self.images),
            compiling=self.grammars.num_compiling,
            total_pages=self.memory.capacity.num_pages,
            free_pages=self.memory.allocator.num_free,
            cached_pages=self.memory.cache.num_evictable,
            total_slots=self.memory.capacity.num_slots,
            free_slots=len(self.memory.free_slots),
            steps=self.planner.num_steps,
            prompt_tokens=self.planner.num_prompt_tokens,
            cached_tokens=self.planner.num_cached_tokens,
            generated_tokens=self.requests.num_generated_tokens,
            retracted=self.planner.num_retracted,
            token_s=self.planner.step_time.token_s,
            context_s=self.planner.step_time.context_s,
            expert_balancedness=self.expert_recorder.balancedness(),
            draft_steps=self.draft_counts.steps,
            draft_tokens=self.draft_counts.proposed,
            accepted_tokens=self.draft_counts.accepted,
            step_seconds=self._steps_s,
            wait_seconds=self._wait_s,
        )
