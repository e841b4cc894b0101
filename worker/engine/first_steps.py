"""Runs the first steps of an engine at start-up, to find failures and to measure the time of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mla_router.worker.generation import SamplingParams
from mla_router.worker.step.engine import StepEngine, StepSeconds
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from mla_router.worker.step.result import StepResult

# The time of a chunk that takes this many seconds predicts the time of longer chunks.
_LONG_S = 0.05
_SHORTEST = 16
_PREFIX = 2048
# Greedy sampling, and random sampling
_SAMPLING = (SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, temperature=1.0, seed=1))


def first_steps(
    engine: StepEngine[Any],
    *,
    vocab_size: int,
    largest: int,
    largest_of_all: Callable[[float], float] = float,
) -> StepSeconds:
    """Runs steps with prompts of up to `largest` tokens, and with a decode row. Returns their times. No request owns the
    pages that they write. Raises the errors of the steps.

    `largest_of_all`: returns the largest value of all DP ranks, which must run the same steps.
    """
    steps = _Steps(engine, vocab_size, largest_of_all)
    for sampling in _SAMPLING:
        steps.chunk(0, 1, sampling)
        steps.decode(1)
    single = min(steps.chunk(0, 1), steps.chunk(0, 1))
    largest = min(largest, steps.longest)
    tokens = min(_SHORTEST, largest)
    chunk = min(steps.chunk(0, tokens), steps.chunk(0, tokens))
    while tokens < largest and chunk < _LONG_S:
        tokens = min(2 * tokens, largest)
        chunk = steps.chunk(0, tokens)
    prefix = min(steps.longest - tokens, _PREFIX)
    return StepSeconds(
        single,
        tokens,
        chunk,
        prefix,
        single_after_prefix=steps.chunk(prefix, 1),
        chunk_after_prefix=steps.chunk(prefix, tokens),
    )


class _Steps:
    """Runs steps of one request in the first slot."""

    def __init__(
        self,
        engine: StepEngine[Any],
        vocab_size: int,
        largest_of_all: Callable[[float], float],
    ) -> None:
        self._engine = engine
        self._largest_of_all = largest_of_all
        self._vocab_size = vocab_size
        capacity = engine.capacity
        longest = min(capacity.context_length, capacity.max_total_tokens) - 1
        self.longest = -int(largest_of_all(-longest))
        pages = min(capacity.pages_per_request, capacity.num_pages)
        self._page_writes = tuple((0, index, 1 + index) for index in range(pages))

    def chunk(self, start: int, length: int, sampling: SamplingParams = _SAMPLING[0]) -> float:
        """Runs a step with a chunk of `length` tokens after a prefix of `start` tokens. Returns its seconds."""
        # Different tokens use as many experts as a real prompt
        tokens = tuple(7919 * i % self._vocab_size for i in range(start, start + length))
        result = self._run(
            StepPlan(
                decode_slots=(),
                decode_bounds=(),
                chunks=(PrefillChunk(0, start, tokens, is_last=True),),
                page_writes=self._page_writes,
                admitted=(Admitted(0, sampling, tokens),),
                **self._drafts(start + length),
            )
        )
        return self._largest_of_all(result.seconds or 0.0)

    def decode(self, before: int) -> None:
        """Runs a step with a decode row after `before` tokens, and with its drafts."""
        capacity = self._engine.capacity
        bound = min(before + 1 + capacity.num_drafts, self.longest)
        self._run(
            StepPlan(
                (0,),
                (bound,),
                (),
                (),
                (),
                num_drafts=capacity.num_drafts,
                tree_nodes=capacity.tree_nodes,
                **self._drafts(bound),
            )
        )

    def _drafts(self, bound: int) -> dict[str, Any]:
        """Returns the fields of a plan that makes drafts, if the engine makes any, after at most `bound` tokens."""
        if not self._engine.capacity.num_drafts:
            return {}
        return {"feeds_drafter": True, "draft_bounds": (min(bound, self.longest),)}

    def _run(self, plan: StepPlan) -> StepResult:
        return self._engine.sample(self._engine.forward(plan)).wait()
