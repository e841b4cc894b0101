"""The logprobs of a given text over HTTP equal those of `transformers`."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import openai
import pytest

from mla_router.worker.config import SMALL_MODEL
from support.processes import Running, post_json
from support.reference import Reference

TOLERANCE = 1e-4  # of a logprob
TOP = 5


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(SMALL_MODEL)


@pytest.fixture(params=["whole prompts", "chunks"])
def url(request: pytest.FixtureRequest, small_worker: str, other_worker: Running) -> str:
    """Returns the URL of a worker. The logprobs must be equal."""
    return small_worker if request.param == "whole prompts" else other_worker.url


def random_prompt(reference: Reference, name: str, length: int) -> list[int]:
    rng = random.Random(name)
    # Not the special tokens at the beginning of the vocabulary.
    return [rng.randrange(300, reference.vocab_size) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 2, 33, 150])
def test_the_native_form(url: str, reference: Reference, length: int) -> None:
    prompt = random_prompt(reference, "native", length)
    expected = reference.logprobs(prompt)
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "top_logprobs_num": TOP,
    }
    # The logprobs do not depend on the cached part of the prompt.
    for start in (0, 0, length // 2):
        answer = post_json(url + "/generate", body | {"logprob_start_len": start})
        meta = answer["meta_info"]
        first, *scored = meta["input_token_logprobs"]
        assert first == [None, prompt[start], None]
        assert [token for _, token, _ in scored] == prompt[start + 1 :]
        for row, (logprob, token, _) in zip(expected[start:-1], scored, strict=True):
            assert logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        for row, entries in zip(expected[start:-1], meta["input_top_logprobs"][1:], strict=True):
            assert len(entries) == TOP
            assert all(a[0] >= b[0] for a, b in pairwise(entries))
            # Equally likely tokens may differ, but not their logprobs.
            best = row.topk(TOP).values.tolist()
            assert [entry[0] for entry in entries] == pytest.approx(best, abs=TOLERANCE)
            assert [float(row[entry[1]]) for entry in entries] == pytest.approx(best, abs=TOLERANCE)


def test_echo_as_lm_eval_asks_for_it(url: str, reference: Reference) -> None:
    """Returns the sum of the logprobs of a text after another one, and whether greedy sampling would generate it."""
    context = random_prompt(reference, "context", 40)
    likely = reference.greedy(context, 6)
    unlikely = random_prompt(reference, "unlikely", 6)
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    answer = client.completions.create(
        model="mla-small",
        prompt=[context + likely.tokens, context + unlikely],
        max_tokens=1,
        temperature=0,
        echo=True,
        logprobs=1,
    )
    greedy = []
    for choice, tokens in zip(answer.choices, (likely.tokens, unlikely), strict=True):
        scores = choice.logprobs
        assert scores is not None
        assert scores.tokens and scores.token_logprobs and scores.top_logprobs
        rows = reference.logprobs(context + tokens)[len(context) - 1 : -1]
        expected = sum(float(row[token]) for row, token in zip(rows, tokens, strict=True))
        assert sum(scores.token_logprobs[len(context) : -1]) == pytest.approx(expected, abs=1e-3)
        places = zip(
            scores.tokens[len(context) : -1], scores.top_logprobs[len(context) : -1], strict=True
        )
        greedy.append(all(token == max(top, key=lambda t: top[t]) for token, top in places))
    assert greedy == [True, False]
