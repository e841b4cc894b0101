"""Random requests for a scripted scheduler with a tiny model."""

from __future__ import annotations

import random

import msgspec

from mla_router.worker.messages import Abort, Generate, ToScheduler
from support.random_sampling import random_sampling
from support.tiny_model import VOCAB_SIZE


def random_script(seed: int, count: int, aborts: bool) -> dict[int, list[ToScheduler]]:
    """Returns `count` requests with random arrival, prefix, length and sampling parameters. A fifth of them is aborted."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(5)]
    script: dict[int, list[ToScheduler]] = {}
    for n in range(count):
        prompt = rng.choice(prefixes)[: rng.randrange(61)]
        prompt = [*prompt, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20)))]
        sampling = random_sampling(rng, VOCAB_SIZE, rng.randint(1, 24))
        if rng.random() < 0.2:
            scored_from = rng.randrange(len(prompt))
            sampling = msgspec.structs.replace(sampling, prompt_logprobs_from=scored_from)
        message = Generate(f"r{n}", prompt, sampling)
        arrives = rng.randrange(count)
        script.setdefault(arrives, []).append(message)
        if aborts and rng.random() < 0.2:
            script.setdefault(arrives + rng.randrange(30), []).append(Abort(f"r{n}"))
    return script
