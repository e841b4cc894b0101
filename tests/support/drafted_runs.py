"""Runs of requests of every kind in one batch, to compare the tokens of engines with and without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.generation import Logprobs, SamplingParams
from mla_router.worker.messages import Generate, Stats, ToScheduler
from support.forcing_grammars import FORCING, ForcingGrammars
from support.random_requests import random_script
from support.scripted_scheduler import Run, assert_nothing_is_allocated, run

# At this temperature a token is the noise of its position, which the drafter draws as well
NOISE_ALONE = 1e6
PAGE_SIZE = 16


@dataclass
class Outcome:
    stats: Stats
    tokens: dict[str, list[int]]
    reasons: dict[str, str]
    logprobs: dict[str, list[float]] = field(default_factory=dict)


def engine_of(folder: Path, drafts: int, pages: int = 120, **settings: Any) -> Engine:
    if drafts:
        nextn = {"speculative_algorithm": "NEXTN", "speculative_num_steps": drafts}
        settings = nextn | settings
    settings = {"max_running_requests": 6, "max_total_tokens": pages * PAGE_SIZE} | settings
    return load_engine(WorkerConfig(model_path=str(folder), device="cpu", **settings))


def mixed_script(seed: int, count: int) -> dict[int, list[ToScheduler]]:
    """Returns random requests: a third with any features, a third greedy, a third that the noise alone decides; of each a
    third has a grammar."""
    rng = random.Random(seed)
    script = random_script(seed, count, aborts=False)
    for messages in script.values():
        for at, message in enumerate(messages):
            assert isinstance(message, Generate)
            kind, old = rng.randrange(3), message.sampling
            if rng.randrange(3) == 0 and not old.allowed:
                message = msgspec.structs.replace(message, grammar=FORCING)
                messages[at] = message
            if kind == 0:
                continue
            plain = SamplingParams(old.max_tokens, stop_token_ids=old.stop_token_ids)
            if kind == 1:
                plain = SamplingParams(20, temperature=NOISE_ALONE, seed=old.seed)
            messages[at] = msgspec.structs.replace(message, sampling=plain)
    return script


def outcome_of(script: dict[int, list[ToScheduler]], engine: Engine, **how: Any) -> Outcome:
    grammars: Any = ForcingGrammars(vocab_size=engine.model.config.vocab_size)
    rids = [m.rid for some in script.values() for m in some if isinstance(m, Generate)]
    vocab_size = engine.model.config.vocab_size
    how |= {"capacity": engine.capacity, "vocab_size": vocab_size, "grammars": grammars}
    ran: Run = run(script, engine=engine, **how)
    # Without times, which differ from run to run
    stats = msgspec.structs.replace(ran.scheduler.stats(), step_seconds=0.0, wait_seconds=0.0)
    assert_nothing_is_allocated(ran)
    found = Outcome(
        stats,
        {rid: ran.channel.tokens(rid) for rid in rids},
        {rid: ran.channel.reason(rid) for rid in rids},
    )
    for rid, deltas in ran.channel.deltas().items():
        scored = [delta.logprobs for delta in deltas if isinstance(delta.logprobs, Logprobs)]
        found.logprobs[rid] = [number for some in scored for number in some.logprobs]
    return found


def served_on_gpu(
    prompts: Sequence[list[int]],
    dtype: str,
    *,
    chunk_size: int,
    overlap: bool = True,
    **settings: Any,
) -> tuple[list[list[int]], Stats]:
    """Returns the tokens of each prompt. In float32 every second request is greedy; noise alone decides the others."""
    settings = {"device": "cuda", "max_total_tokens": 8192, "max_running_requests": 8} | settings
    limits = {"max_prefill_tokens": 256, "piecewise_cuda_graph_max_tokens": 256}
    engine = load_engine(WorkerConfig(dtype=dtype, **limits, **settings))
    script: dict[int, list[ToScheduler]] = {}
    for n, prompt in enumerate(prompts):
        noisy = n % 2 == 0 or dtype != "float32"
        sampling = SamplingParams(41, temperature=NOISE_ALONE if noisy else 0.0, seed=n)
        script[2 * n] = [Generate(f"r{n}", prompt, sampling)]
    ran = run(
        script,
        engine=engine,
        capacity=engine.capacity,
        vocab_size=engine.model.config.vocab_size,
        overlap=overlap,
        chunk_size=chunk_size,
    )
    return [ran.channel.tokens(f"r{n}") for n in range(len(prompts))], ran.scheduler.stats()
