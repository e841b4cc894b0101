"""The steps of random requests on one rank, and their results, as numbers to compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from mla_router.worker.generation import Logprobs
from mla_router.worker.kernels.comm.groups import ONE_RANK
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.result import StepResult
from support.drafted_runs import mixed_script
from support.random_requests import random_script
from support.rank_engine import RecordingEngine, engine_of_rank
from support.scripted_scheduler import run
from support.tiny_model import VOCAB_SIZE

CAPACITY = Capacity(num_pages=400, page_size=4, num_slots=12, context_length=160)
TOLERANCE = 1e-4  # of a logprob: sums have another order


def served(
    folder: Path, *, seed: int = 0, count: int = 12, capacity: Capacity = CAPACITY, **how: Any
) -> RecordingEngine:
    """Returns the engine of one rank after random requests. `how`: see `engine_of_rank`."""
    engine = engine_of_rank(ONE_RANK, folder, capacity, **how)
    serve(engine, seed, count)
    return engine


def serve(engine: RecordingEngine, seed: int, count: int) -> None:
    with_drafts = engine.capacity.num_drafts > 0
    run(
        mixed_script(seed, count) if with_drafts else random_script(seed, count, aborts=True),
        engine=engine,
        capacity=engine.capacity,
        vocab_size=VOCAB_SIZE,
        chunk_size=32,
    )


def numbers(steps: Sequence[StepResult]) -> list[float]:
    """Returns all logprobs. Those of the most likely tokens are in order, whatever the tokens are."""
    found: list[Logprobs | None] = []
    for step in steps:
        found += [*(step.logprobs or ()), *(step.prompt_logprobs or ())]
    values = list[float]()
    for some in found:
        if some is not None:
            values += [*some.logprobs, *chain.from_iterable(some.top_logprobs)]
    return [value if math.isfinite(value) else -1e9 for value in values]


def assert_same(got: Sequence[StepResult], wanted: Sequence[StepResult]) -> None:
    """Asserts equal tokens, and equal logprobs but for rounding."""
    assert [step.tokens for step in got] == [step.tokens for step in wanted]
    assert numbers(got) == pytest.approx(numbers(wanted), abs=TOLERANCE)
