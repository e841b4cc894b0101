"""Logprobs of prompt tokens: each requested one exactly once, for any cached prefix and any chunks."""

from __future__ import annotations

import pytest

from mla_router.worker.messages import Abort, ToScheduler
from support.fake_engine import continuation, logprob
from support.scripted_scheduler import assert_nothing_is_allocated, generate, run

PROMPT = [i * 7 % 50 for i in range(30)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
@pytest.mark.parametrize("first", [0, 1, 2, 8, 9, 28, 29, 30, 99])
def test_the_first_delta_has_the_requested_logprobs(
    first: int, chunk_size: int, overlap: bool
) -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("warm", PROMPT)],
        99: [generate("a", PROMPT, prompt_logprobs_from=first), generate("b", PROMPT)],
    }
    outcome = run(script, chunk_size=chunk_size, overlap=overlap)
    told, *others = outcome.channel.deltas()["a"]
    # The first token of a prompt has no logprob.
    want = [logprob(PROMPT[:i], PROMPT[i]) for i in range(max(1, first), len(PROMPT))]
    assert told.prompt_logprobs is not None
    assert told.prompt_logprobs.logprobs == want
    assert all(delta.prompt_logprobs is None for delta in others)
    assert all(delta.prompt_logprobs is None for delta in outcome.channel.deltas()["b"])
    # Only rows without logprobs come from the cache, in whole pages of 4.
    assert told.cached_tokens == max(0, min(first, len(PROMPT)) - 1) // 4 * 4
    assert outcome.channel.tokens("a") == continuation(PROMPT, 4)
    assert_nothing_is_allocated(outcome)


def test_a_prompt_with_logprobs_does_not_wait_for_a_prefix_that_it_cannot_use() -> None:
    prompt = [i % 50 for i in range(64)]
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", prompt), generate("b", prompt, prompt_logprobs_from=0)]
    }
    outcome = run(script, chunk_size=256)
    assert outcome.scheduler.stats().steps == 4


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", range(1, 8))
def test_a_request_can_be_aborted_while_logprobs_are_computed(when: int, overlap: bool) -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", PROMPT, prompt_logprobs_from=0), generate("b", PROMPT)],
        when: [Abort("a")],
    }
    outcome = run(script, chunk_size=7, overlap=overlap)
    assert outcome.channel.tokens("b") == continuation(PROMPT, 4)
    assert_nothing_is_allocated(outcome)
