"""Plans the next step from integers that the host has: no result of a launched step is needed."""

from __future__ import annotations

from mla_router.worker.core import Admitted, StepPlan
from mla_router.worker.scheduler.admission import Admission
from mla_router.worker.scheduler.memory import Memory
from mla_router.worker.scheduler.request import Request
from mla_router.worker.scheduler.step import Step


class Planner:
    """The requests that wait and those that run, and what the next step does for them."""

    def __init__(self, memory: Memory, admission: Admission) -> None:
        self.memory = memory
        self.admission = admission
        self.running: dict[str, Request] = {}  # by rid: those with a slot, in order of admission
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def next_step(self) -> Step | None:
        """One row for every running request that wants a token, and prompt tokens beside them;
        None if there is nothing to compute."""
        decodes = [request for request in self.running.values() if request.wants_decode]
        writes: list[tuple[int, int, int]] = []
        lengths = []
        for request in decodes:
            length = request.take_decode()
            lengths.append(length)
            writes += self.memory.grow(request, length)
        shares, admitted = self.admission.next_prefills()
        for request in admitted:
            self.running[request.rid] = request
            writes += [(request.slot, i, page) for i, page in enumerate(request.pages)]
            self.num_prompt_tokens += len(request.context)
            self.num_cached_tokens += request.num_cached
        prefills, chunks = [], []
        for request, tokens in shares:
            prefills.append(request)
            chunks.append(request.take_chunk(tokens))
            writes += self.memory.grow(request, request.launched_prompt)
        if not decodes and not chunks:
            return None
        self.num_steps += 1
        plan = StepPlan(
            decode_slots=tuple(request.slot for request in decodes),
            decode_lengths=tuple(lengths),
            chunks=tuple(chunks),
            page_writes=tuple(writes),
            admitted=tuple(
                Admitted(r.slot, r.sampling, r.prompt, r.context[len(r.prompt) :]) for r in admitted
            ),
        )
        started = [r for r, chunk in zip(prefills, chunks, strict=True) if chunk.is_last]
        return Step(plan, prefills, decodes + started)

    def remove(self, request: Request) -> None:
        """Let go of a request that has ended, wherever it is."""
        if self.running.pop(request.rid, None) is None:
            self.admission.waiting.remove(request)
        else:
            self.admission.settle()
            self.memory.release(request)
