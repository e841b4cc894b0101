"""Random sampling parameters, to be mixed in one batch."""

from __future__ import annotations

import random

from mla_router.worker.generation import SamplingParams
from support.token_masks import token_bits


def random_sampling(rng: random.Random, vocab_size: int, max_tokens: int = 16) -> SamplingParams:
    """Uses each feature for about a third of the requests, independently."""

    def some(value: object, off: object) -> object:
        return value if rng.random() < 0.35 else off

    def token() -> int:
        return rng.randrange(vocab_size)

    scored = rng.random() < 0.35
    # transformers' SequenceBiasLogitsProcessor refuses token 0.
    biased = {rng.randrange(1, vocab_size) for _ in range(5)}
    bias = [(token, rng.choice([-100.0, -1.5, 2.5, 100.0])) for token in biased]
    stop_token_ids = frozenset(token() for _ in range(rng.choice([0, 1, 20])))
    # At least one token that is not a stop token; otherwise min_tokens might leave no token.
    allowed = {token() for _ in range(30)} | {min(set(range(30)) - stop_token_ids)}
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
        top_k=some(rng.choice([1, 5, 50, vocab_size - 1]), 0),  # type: ignore[arg-type]
        top_p=some(rng.choice([0.1, 0.5, 0.9]), 1.0),  # type: ignore[arg-type]
        min_p=some(rng.choice([0.02, 0.2, 1.0]), 0.0),  # type: ignore[arg-type]
        seed=rng.randrange(1 << 62),
        repetition_penalty=some(rng.choice([0.5, 1.3, 2.0]), 1.0),  # type: ignore[arg-type]
        frequency_penalty=some(rng.choice([-2.0, 0.4, 2.0]), 0.0),  # type: ignore[arg-type]
        presence_penalty=some(rng.choice([-2.0, 0.7, 2.0]), 0.0),  # type: ignore[arg-type]
        logit_bias=some(tuple(bias), ()),  # type: ignore[arg-type]
        min_tokens=some(rng.randint(1, max_tokens), 0),  # type: ignore[arg-type]
        stop_token_ids=stop_token_ids,
        logprobs=scored,
        top_logprobs=rng.choice([0, 3, 20]) if scored else 0,
        allowed=some(token_bits(allowed, vocab_size), b""),  # type: ignore[arg-type]
    )
