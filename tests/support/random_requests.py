"""Random requests for a scripted scheduler on a tiny model."""

from __future__ import annotations

import random

from mla_router.worker.messages import Abort, ToScheduler
from support.scripted_scheduler import generate
from support.tiny_model import VOCAB_SIZE


def random_script(seed: int, count: int, aborts: bool) -> dict[int, list[ToScheduler]]:
    """`count` requests of random arrival, prefix, length and settings; a fifth of them aborted."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(5)]
    script: dict[int, list[ToScheduler]] = {}
    for n in range(count):
        prompt = rng.choice(prefixes)[: rng.randrange(61)]
        prompt = [*prompt, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20)))]
        sampled = rng.random() < 0.5
        message = generate(
            f"r{n}",
            prompt,
            rng.randint(1, 24),
            temperature=rng.choice([0.5, 1.0, 2.0]) if sampled else 0.0,
            top_k=rng.choice([0, 5, 50]),
            top_p=rng.choice([0.5, 0.9, 1.0]),
            seed=rng.randrange(1 << 62),
            stop_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 20])),
            logprobs=rng.random() < 0.3,
        )
        arrives = rng.randrange(count)
        script.setdefault(arrives, []).append(message)
        if aborts and rng.random() < 0.2:
            script.setdefault(arrives + rng.randrange(30), []).append(Abort(f"r{n}"))
    return script
