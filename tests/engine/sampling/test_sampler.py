"""Batches with different sampling parameters in each row, against transformers' processors row by row."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mla_router.worker.generation import SamplingParams
from mla_router.worker.kernels.sampling.noise import gumbel
from mla_router.worker.step.result import NO_TOKEN
from support.examples import examples
from support.random_sampling import random_sampling
from support.sampler_driver import SamplerDriver
from support.token_masks import token_masks

V = 1100  # a top_k can be larger than top_threshold.SHORTLIST


def draw_logits(seed: int) -> Tensor:
    return 4 * torch.randn(V, generator=torch.Generator().manual_seed(seed))


def processed(
    logits: Tensor, sampling: SamplingParams, prompt: list[int], output: list[int]
) -> Tensor:
    """Returns the logits after penalties, bias, min_tokens and allowed tokens: by transformers' processors, and by
    OpenAI's formula for frequency and presence penalty."""
    context = torch.tensor([prompt + output])
    scores = logits[None].clone()
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[t], b] for t, b in sampling.logit_bias]))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_tokens and sampling.stop_token_ids:
        ids = sorted(sampling.stop_token_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_tokens, ids))
    scores = processors(context, scores)[0]
    for token in set(output):
        scores[token] -= output.count(token) * sampling.frequency_penalty
        scores[token] -= sampling.presence_penalty
    if sampling.allowed:
        bits = [sampling.allowed[token // 8] >> token % 8 & 1 for token in range(V)]
        scores[~torch.tensor(bits, dtype=torch.bool)] = float("-inf")
    return scores


def warped(scores: Tensor, sampling: SamplingParams) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.int64), scores[None])[0]


def expected_token(scores: Tensor, sampling: SamplingParams, position: int) -> int:
    if sampling.temperature > 0:
        noise = gumbel(torch.tensor([sampling.seed]), torch.tensor([position]), V)[0]
        scores = warped(scores, sampling) + noise
    return int(scores.argmax())


def test_mixed_batches_agree_with_transformers_row_by_row() -> None:
    rng = random.Random(1)
    driver = SamplerDriver(48, V)
    live: dict[int, tuple[SamplingParams, list[int]]] = {}
    used = 0
    for step in range(40):
        for slot in range(48):
            if slot not in live or len(driver.contexts[slot]) - len(live[slot][1]) == 16:
                prompt = [rng.randrange(V) for _ in range(rng.randint(1, 30))]
                live[slot] = random_sampling(rng, V), prompt
                driver.admit(slot, live[slot][0], prompt)
        slots = rng.sample(range(48), rng.randint(1, 48))
        before = {slot: list(driver.contexts[slot]) for slot in slots}
        logits = {slot: draw_logits(1000 * step + slot) for slot in slots}
        result, rows = driver.step_and_look(logits)
        for row, slot in enumerate(slots):
            sampling, prompt = live[slot]
            want = processed(logits[slot], sampling, prompt, before[slot][len(prompt) :])
            torch.testing.assert_close(rows[row], want)
            expected = expected_token(want, sampling, len(before[slot]))
            assert result.tokens[row] == [expected], sampling
            used += want.isneginf().any().item() or not want.equal(logits[slot])
    assert used > 300


def answer(
    driver: SamplerDriver, slot: int, sampling: SamplingParams, seed: int, context: list[list[int]]
) -> list[int]:
    """Returns the 12 tokens after a prompt (and an output), in a batch of one request."""
    driver.admit(slot, sampling, *context)
    start = sum(map(len, context))
    for n in range(start, len(context[0]) + 12):
        driver.step({slot: draw_logits(seed + n)})
    return driver.contexts[slot][len(context[0]) :]


@examples(10)
@given(seed=st.integers(0, 1 << 32), cut=st.integers(1, 11))
def test_the_tokens_of_a_request_depend_on_nothing_else(seed: int, cut: int) -> None:
    """They do not depend on the batch, the slot, or a continuation on another worker."""
    rng = random.Random(seed)
    requests = {}
    for slot in rng.sample(range(12), 8):
        prompt = [rng.randrange(V) for _ in range(rng.randint(1, 20))]
        requests[slot] = random_sampling(rng, V, 12), prompt, rng.randrange(1 << 32)
    together = SamplerDriver(12, V)
    waiting, running = list(requests), []
    while waiting or running:
        if waiting and rng.random() < 0.5:
            running.append(slot := waiting.pop())
            together.admit(slot, *requests[slot][:2])
        rng.shuffle(running)
        if running:
            contexts = together.contexts
            together.step(
                {slot: draw_logits(requests[slot][2] + len(contexts[slot])) for slot in running}
            )
        running = [
            slot for slot in running if len(together.contexts[slot]) < len(requests[slot][1]) + 12
        ]
    alone = SamplerDriver(1, V)
    for slot, (sampling, prompt, noise) in requests.items():
        whole = answer(alone, 0, sampling, noise, [prompt])
        assert whole == together.contexts[slot][len(prompt) :]
        assert answer(alone, 0, sampling, noise, [prompt, whole[:cut]]) == whole


def test_bitmasks_allow_the_tokens_of_their_bits() -> None:
    driver, rng = SamplerDriver(9, V), random.Random(2)
    for slot in range(9):
        sampling = SamplingParams(
            400, temperature=slot % 3 / 2, top_p=0.7 if slot > 4 else 1.0, repetition_penalty=1.1
        )
        driver.admit(slot, sampling, [1])
    for step in range(50):
        allowed = {
            row: rng.sample(range(V), rng.choice([1, 2, 900]))
            for row in sorted(rng.sample(range(9), 5))
        }
        allowed[next(iter(allowed))] = [31, 32, 63, V - 1]
        logits = {slot: draw_logits(10 * step + slot) for slot in range(9)}
        result, rows = driver.step_and_look(logits, token_masks(allowed, V))
        for row, (token,) in enumerate(result.tokens):
            want = set(allowed.get(row, range(V)))
            assert token in want
            assert set(rows[row].isfinite().nonzero().flatten().tolist()) == want


@pytest.mark.parametrize("broken", ["nan", "all nan", "inf", "all masked", "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_row_without_a_token_does_not_affect_others(
    broken: str, temperature: float, top_p: float
) -> None:
    sampling = SamplingParams(
        9, temperature, top_p=top_p, presence_penalty=0.1, logprobs=True, top_logprobs=2
    )
    healthy = SamplerDriver(3, V)
    driver = SamplerDriver(3, V)
    for slot in range(3):
        healthy.admit(slot, sampling, [slot])
        driver.admit(slot, sampling, [slot])
    logits = {slot: draw_logits(slot) for slot in range(3)}
    want = healthy.step(logits)
    row = logits[1] = logits[1].clone()
    allowed = None
    match broken:
        case "nan":
            row[7] = float("nan")
        case "all nan":
            row[:] = float("nan")
        case "inf":
            row[7] = float("inf")
        case "all masked":
            allowed = token_masks({1: []}, V)
        case "all -inf":
            row[:] = float("-inf")
    got = driver.step(logits, allowed)
    assert got.tokens == [want.tokens[0], [NO_TOKEN], want.tokens[2]]
    assert want.logprobs is not None and got.logprobs is not None
    assert got.logprobs[::2] == want.logprobs[::2]


def test_token_counts_are_allocated_for_the_first_penalty() -> None:
    driver = SamplerDriver(4, V)
    driver.admit(0, SamplingParams(9, 0.8, top_k=4, min_p=0.1, logprobs=True), [1])
    driver.step({0: draw_logits(0)})
    assert driver.sampler.penalty_bytes == 0
    driver.admit(1, SamplingParams(9, presence_penalty=0.5), [1])
    driver.step({0: draw_logits(1), 1: draw_logits(2)})
    assert driver.sampler.penalty_bytes == 4 * 4 * V


def test_logprobs_are_those_before_bias_and_penalties() -> None:
    """All rows want them, so that no row of the logits is left out of the copy."""
    driver = SamplerDriver(2, V)
    driver.admit(0, SamplingParams(9, logprobs=True, logit_bias=((5, 50.0),)), [1])
    driver.admit(1, SamplingParams(9, logprobs=True, repetition_penalty=3.0), list(range(V)))
    logits = {slot: draw_logits(slot) for slot in range(2)}
    got = driver.step(logits)
    assert got.tokens[0] == [5]
    assert got.logprobs is not None
    for row, own in enumerate(got.logprobs):
        assert own is not None
        expected = logits[row].log_softmax(0)[got.tokens[row][0]].item()
        assert own.logprobs == pytest.approx([expected], abs=1e-4)
