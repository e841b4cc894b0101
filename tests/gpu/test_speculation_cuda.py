"""Speculative decoding with CUDA graphs: the tokens of an engine without drafts, and no hidden wait for the device."""

from __future__ import annotations

from functools import partial

import pytest

from support.drafted_runs import served_on_gpu

pytestmark = pytest.mark.gpu

# The first one is alone in its step: a prefill graph
PROMPTS = [[(7 * n + 3 * i) % 1000 for i in range(30 + 40 * n if n else 90)] for n in range(6)]
served = partial(served_on_gpu, PROMPTS, chunk_size=128, context_length=512)


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
