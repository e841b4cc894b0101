"""A follower that gets the calls of a leader ends with the same state, for random requests with aborts and grammars."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mla_router.worker.engine.engine import Engine
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.mask_memory import MaskMemory
from mla_router.worker.model.loader import load_model
from mla_router.worker.ranks.calls import EngineCall, decode, encode
from mla_router.worker.ranks.channel import CallReceiver, CallSender
from mla_router.worker.ranks.follower import Follower
from mla_router.worker.ranks.leader import Leader
from mla_router.worker.scheduler.scheduler import EngineFailed
from mla_router.worker.step.engine import Capacity, StepEngine
from mla_router.worker.step.plan import StepPlan, TokenMasks
from mla_router.worker.step.result import StepResult
from support.attention import torch_attention
from support.fake_engine import FakeEngine
from support.faulty_engine import FaultyEngine
from support.forcing_grammars import FORCING, ForcingGrammars
from support.random_requests import random_script
from support.scripted_scheduler import generate, run
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

CAPACITY = Capacity(num_pages=64, page_size=4, num_slots=4, context_length=64)


def follower(engine: StepEngine[Any], masks: MaskMemory | None = None) -> Follower:
    leader = Heartbeat.create()
    return Follower(engine, leader.of_rank(1), leader, masks or MaskMemory.create(1, 32))


class Wire:
    """Runs each call on a follower at once, as it comes out of its bytes."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower

    def send(self, call: EngineCall, bits: np.ndarray | None = None) -> None:  # noqa: ARG002
        self.follower.do(decode(encode(call)))


def finish(engine: FakeEngine) -> None:
    while engine.launched:
        engine.run_until(engine.launched[0])


@pytest.mark.parametrize("overlap", [True, False])
def test_masks_and_retractions_reach_the_follower(overlap: bool) -> None:
    own, other = FakeEngine(CAPACITY), FakeEngine(CAPACITY)
    script: dict[int, list[Any]] = {
        turn: [
            generate(f"free{turn}", [turn, 5, 6], 30, seed=turn),
            generate(f"bound{turn}", [turn] * 9, 20, grammar=FORCING),
        ]
        for turn in range(0, 40, 4)
    }
    tight = Capacity(num_pages=20, page_size=4, num_slots=4, context_length=64)
    grammars: Any = ForcingGrammars()
    outcome = run(
        script,
        engine=Leader(own, Wire(follower(other, grammars.memory))),
        capacity=tight,
        overlap=overlap,
        grammars=grammars,
        schedule_conservativeness=0.01,
    )
    finish(own)
    finish(other)
    assert outcome.scheduler.planner.num_steps == own.sampled == other.sampled > 50
    assert other.cache == own.cache
    assert other.last_token == own.last_token
    assert other.page_table == own.page_table


def test_a_real_follower_has_the_same_cache_and_tokens(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    capacity = Capacity(num_pages=200, page_size=4, num_slots=8, context_length=160)

    def engine() -> Engine:
        return Engine(
            model,
            capacity,
            device=torch.device("cpu"),
            dtype=torch.float32,
            attention=torch_attention(model.config),
        )

    own, other = engine(), engine()
    run(
        random_script(3, 25, aborts=True),
        engine=Leader(own, Wire(follower(other))),
        capacity=capacity,
        vocab_size=VOCAB_SIZE,
        chunk_size=16,
    )
    assert own.slots.lengths.max() > 20
    for mine, theirs in (
        (own.slots.last_token, other.slots.last_token),
        (own.slots.lengths, other.slots.lengths),
        (own.slots.page_table, other.slots.page_table),
        *zip(own.kv_cache.layers, other.kv_cache.layers, strict=True),
    ):
        assert torch.equal(mine, theirs)


def test_calls_pass_the_sockets_in_order() -> None:
    with tempfile.TemporaryDirectory() as folder:
        receivers = [CallReceiver(Path(folder), rank) for rank in (1, 2)]
        sender = CallSender(Path(folder), 3)
        # The prompt makes a frame that ZMQ does not copy.
        capacity = Capacity(num_pages=9000, page_size=4, num_slots=4, context_length=40_000)
        own = FakeEngine(capacity)
        others = [FakeEngine(capacity) for _ in receivers]
        script: dict[int, list[Any]] = {
            0: [generate("long", [7] * 30_000, 5), generate("short", [8], 9)]
        }
        run(script, engine=Leader(own, sender), capacity=capacity, chunk_size=20_000)
        finish(own)
        for engine, receiver in zip(others, receivers, strict=True):
            one = follower(engine)
            for _ in range(2 * own.sampled):
                call = receiver.receive(60.0)
                assert call is not None
                one.do(call)
            assert receiver.receive(0.0) is None
            finish(engine)
            assert engine.cache == own.cache
            receiver.close()
        sender.close()


@pytest.mark.parametrize("phase", ["fail_forward", "fail_sample", "fail_wait"])
def test_a_failed_step_of_rank_0_ends_it(phase: str) -> None:
    """Without other ranks it would end its requests alone: `tests/scheduler/test_faults.py`."""
    engine = FaultyEngine(CAPACITY, **{phase: {1}})
    with pytest.raises(EngineFailed):
        run(
            {0: [generate("a", [1], 9)]},
            engine=Leader(engine, Wire(follower(FakeEngine(CAPACITY)))),
            capacity=CAPACITY,
        )
    assert len(engine.plans) <= 3


class CountingStep:
    """A step of `CountingEngine`."""

    def __init__(self, engine: CountingEngine) -> None:
        self.engine = engine

    def wait(self) -> StepResult:
        self.engine.in_flight -= 1
        return StepResult([])


class CountingEngine(FakeEngine):
    """Counts the launched steps that nobody has waited for."""

    in_flight = most = 0

    def forward(self, plan: StepPlan) -> Any:  # noqa: ARG002
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        return CountingStep(self)

    def sample(self, step: Any, masks: TokenMasks | None = None) -> Any:  # noqa: ARG002
        return step


def test_a_follower_has_two_steps_in_flight_at_most() -> None:
    """Engines reuse host memory two steps later."""
    engine = CountingEngine(CAPACITY)
    run(
        {0: [generate("a", [1], 9)]},
        engine=Leader(FakeEngine(CAPACITY), Wire(follower(engine))),
        capacity=CAPACITY,
    )
    assert engine.most == 2
