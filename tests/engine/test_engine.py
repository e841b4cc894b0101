"""The scheduler on a real model: what may not change a request's tokens does not change them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_router.worker.core import Capacity
from mla_router.worker.engine.engine import Engine
from mla_router.worker.messages import ToScheduler
from mla_router.worker.model.deepseek import DeepseekForCausalLM
from mla_router.worker.model.loader import load_model
from support.random_requests import random_script
from support.scripted_scheduler import Run, generate, run
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

CPU = torch.device("cpu")
CAPACITY = Capacity(num_pages=400, page_size=4, num_slots=12, context_length=160)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekForCausalLM:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, **CONFIGS["v3"])
    return load_model(folder, device=CPU, dtype=torch.float32)


def serve(
    model: DeepseekForCausalLM,
    script: dict[int, list[ToScheduler]],
    capacity: Capacity = CAPACITY,
    **how,
) -> Run:
    engine = Engine(model, capacity, device=CPU, dtype=torch.float32)
    return run(script, engine=engine, capacity=capacity, vocab_size=VOCAB_SIZE, **how)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_overlap_and_normal_give_identical_tokens(model: DeepseekForCausalLM, seed: int) -> None:
    script = random_script(seed, 200, aborts=True)
    overlap = serve(model, script, overlap=True, chunk_size=32)
    normal = serve(model, script, overlap=False, chunk_size=32)
    ended = 0
    for n in range(200):
        rid = f"r{n}"
        got, want = overlap.channel.tokens(rid), normal.channel.tokens(rid)
        if "abort" in (overlap.channel.reason(rid), normal.channel.reason(rid)):
            common = min(len(got), len(want))
            assert got[:common] == want[:common]
        else:
            assert got == want
            assert overlap.channel.reason(rid) == normal.channel.reason(rid)
            ended += 1
    assert ended > 120
    for outcome in (overlap, normal):
        stats = outcome.scheduler.stats()
        assert stats.free_slots == stats.total_slots
        assert stats.free_pages + stats.cached_pages == stats.total_pages


def test_neither_cache_nor_chunks_nor_neighbours_change_the_tokens(
    model: DeepseekForCausalLM,
) -> None:
    script = random_script(7, 40, aborts=False)
    reference = serve(model, script, chunk_size=4096, use_prefix_cache=False)
    others = [
        serve(model, script, chunk_size=7),
        serve(model, script, chunk_size=64, overlap=False),
        serve(model, script, Capacity(1600, 1, 3, 160), chunk_size=16),
    ]
    for n in range(40):
        for other in others:
            assert other.channel.tokens(f"r{n}") == reference.channel.tokens(f"r{n}")


def test_logprobs_are_told_to_those_who_ask(model: DeepseekForCausalLM) -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", [5, 6, 7], 5, logprobs=True), generate("b", [5, 6, 7], 5)]
    }
    deltas = serve(model, script).channel.deltas()
    assert all(delta.scores and delta.scores.logprobs[0] <= 0 for delta in deltas["a"])
    assert all(delta.scores is None for delta in deltas["b"])
