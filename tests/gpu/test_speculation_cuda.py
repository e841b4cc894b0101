"""Speculative decoding with CUDA graphs: the tokens of an engine without drafts, and no hidden wait for the device."""

from __future__ import annotations

from typing import Any

import pytest

from mla_router.worker.config import WorkerConfig
from mla_router.worker.core import SamplingParams
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.messages import Generate, Stats, ToScheduler
from support.scripted_scheduler import run

pytestmark = pytest.mark.gpu

# At this temperature the noise of its position decides a token, and a draft as well
NOISE_ALONE = 1e6
REQUESTS, TOKENS = 6, 41


def served(dtype: str, *, overlap: bool = True, **settings: Any) -> tuple[list[list[int]], Stats]:
    """Returns the tokens of requests of the small model, of which some are decided by noise alone, the others greedy."""
    engine = load_engine(
        WorkerConfig(
            device="cuda",
            dtype=dtype,
            max_total_tokens=8192,
            max_running_requests=8,
            context_length=512,
            max_prefill_tokens=256,
            piecewise_cuda_graph_max_tokens=256,
            **settings,
        )
    )
    script: dict[int, list[ToScheduler]] = {}
    for n in range(REQUESTS):
        noisy = n % 2 == 0 or dtype != "float32"
        sampling = SamplingParams(TOKENS, temperature=NOISE_ALONE if noisy else 0.0, seed=n)
        # The first one is alone in its step: a prefill graph
        prompt = [(7 * n + 3 * i) % 1000 for i in range(90 if n == 0 else 30 + 40 * n)]
        script.setdefault(2 * n, []).append(Generate(f"r{n}", prompt, sampling))
    vocab_size = engine.model.config.vocab_size
    ran = run(
        script,
        engine=engine,
        capacity=engine.capacity,
        vocab_size=vocab_size,
        overlap=overlap,
        chunk_size=128,
    )
    return [ran.channel.tokens(f"r{n}") for n in range(REQUESTS)], ran.scheduler.stats()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafts", [1, 3])
def test_tokens_are_those_without_drafts(dtype: str, drafts: int) -> None:
    """With graphs in bfloat16, where noise alone decides: roundings do not matter. In float32 for greedy requests as well."""
    expected, _ = served(dtype)
    settings = {"speculative_algorithm": "NEXTN", "speculative_num_steps": drafts}
    for overlap in (True, False):
        got, stats = served(dtype, overlap=overlap, **settings)
        assert got == expected
        if dtype == "bfloat16":
            assert stats.accepted_tokens >= 0.9 * stats.draft_tokens > 0
