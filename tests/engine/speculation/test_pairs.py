"""Drafts change no token of requests with any two other features. The engine is a real one.

Each pair is a request of one run, so the rows of a step are of many kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mla_router.worker.messages import Generate, ToScheduler
from support.drafted_runs import NOISE_ALONE, engine_of, outcome_of
from support.forcing_grammars import FORCING
from support.scripted_scheduler import generate
from support.tiny_drafter import write_tiny_drafter
from support.tiny_model import VOCAB_SIZE
from support.token_masks import token_bits

SHARED = [7 * i % VOCAB_SIZE for i in range(40)]


def sampling(**changes: Any) -> Callable[[Generate], Generate]:
    return lambda request: msgspec.structs.replace(
        request, sampling=msgspec.structs.replace(request.sampling, **changes)
    )


FEATURES: dict[str, Callable[[Generate], Generate]] = {
    "greedy": sampling(temperature=0.0),
    "noise alone": sampling(temperature=NOISE_ALONE),
    "filtered": sampling(top_k=20, top_p=0.8),
    "repetition": sampling(repetition_penalty=1.3),
    "frequency": sampling(frequency_penalty=0.7, presence_penalty=0.3),
    "bias": sampling(logit_bias=((3, 4.0), (9, -4.0))),
    "min_tokens": sampling(min_tokens=6, stop_token_ids=frozenset(range(0, VOCAB_SIZE, 3))),
    "allowed": sampling(allowed=token_bits(set(range(10, 60)), VOCAB_SIZE)),
    "logprobs": sampling(logprobs=True, top_logprobs=3),
    "scored prompt": sampling(prompt_logprobs_from=2),
    "grammar": lambda request: msgspec.structs.replace(request, grammar=FORCING),
    "continued": lambda request: msgspec.structs.replace(request, output=[11, 12, 13]),
    "cached": lambda request: msgspec.structs.replace(request, prompt=[*SHARED, *request.prompt]),
}


def script() -> dict[int, list[ToScheduler]]:
    """Returns a request of each pair that the server would send: it makes a bitmask of allowed tokens and a grammar one."""
    messages: dict[int, list[ToScheduler]] = {}
    for n, pair in enumerate(combinations(FEATURES, 2)):
        if pair == ("allowed", "grammar"):
            continue
        request = generate("-".join(pair), [n % VOCAB_SIZE, 5, 6, 7], 9, temperature=3.0, seed=n)
        for feature in pair:
            request = FEATURES[feature](request)
        messages.setdefault(n // 8, []).append(request)
    return messages


@pytest.mark.parametrize("overlap", [True, False], ids=["chain", "tree, no overlap"])
def test_any_two_features(tmp_path: Path, overlap: bool) -> None:
    settings: dict[str, Any] = {}
    eagle = write_tiny_drafter(tmp_path, "v3" if overlap else "llama_gqa")
    if eagle is not None:
        settings = {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": str(eagle),
            "speculative_eagle_topk": 3,
            "speculative_num_draft_tokens": 8,
        }
    many = {"max_running_requests": 32}
    expected = outcome_of(script(), engine_of(tmp_path / "model", 0, **many))
    drafting = engine_of(tmp_path / "model", 3, **many, **settings)
    got = outcome_of(script(), drafting, overlap=overlap, chunk_size=24)
    for pair, tokens in expected.tokens.items():
        assert (got.tokens[pair], got.reasons[pair]) == (tokens, expected.reasons[pair]), pair
        assert got.logprobs[pair] == pytest.approx(expected.logprobs[pair], abs=1e-4), pair
    assert got.stats.accepted_tokens > 100, got.stats
