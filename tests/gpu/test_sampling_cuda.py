"""Sampling on a GPU: the CPU's tokens and logprobs, and no hidden wait for the device."""

from __future__ import annotations

import random

import pytest
import torch

from mla_router.worker.generation import Logprobs, SamplingParams
from mla_router.worker.step.result import NO_TOKEN
from support.cuda import forbid_waiting
from support.random_sampling import random_sampling
from support.sampler_driver import SamplerDriver
from support.token_masks import token_masks

pytestmark = pytest.mark.gpu


def values(logprobs: Logprobs | None) -> list[float]:
    if logprobs is None:
        return []
    return logprobs.logprobs + [value for row in logprobs.top_logprobs for value in row]


@pytest.mark.parametrize(("vocab_size", "slots", "steps"), [(1000, 300, 12), (129_280, 20, 4)])
def test_mixed_batches_are_the_cpu_s(vocab_size: int, slots: int, steps: int) -> None:
    """More rows than a slice, and the vocabulary size of V3."""
    rng = random.Random(vocab_size)
    noise = torch.Generator().manual_seed(1)
    gpu = SamplerDriver(slots, vocab_size, "cuda", forbid_waiting)
    cpu = SamplerDriver(slots, vocab_size)
    prompts = [rng.choices(range(vocab_size), k=rng.randint(1, 50)) for _ in range(slots)]
    samplings = [random_sampling(rng, vocab_size) for _ in range(slots)]
    for slot in range(slots):
        for driver in (gpu, cpu):
            driver.admit(slot, samplings[slot], prompts[slot])
    for step in range(steps):
        some = rng.sample(range(slots), rng.choice([slots // 2, slots]))
        logits = {slot: 4 * torch.randn(vocab_size, generator=noise) for slot in some}
        masks = None
        if step % 2:
            rows = sorted(rng.sample(range(len(some)), 5))
            allowed = {row: rng.sample(range(vocab_size), vocab_size // 2) for row in rows}
            masks = token_masks(allowed, vocab_size)
        got, got_rows = gpu.step_and_look(logits, masks)
        want, want_rows = cpu.step_and_look(logits, masks)
        torch.testing.assert_close(got_rows, want_rows)
        # The order of summation may decide on a token at the edge of top_p.
        other = [i for i in range(len(some)) if got.tokens[i] != want.tokens[i]]
        assert len(other) <= 1 + len(some) // 100, [samplings[some[i]] for i in other]
        assert got.logprobs is not None and want.logprobs is not None
        for i in range(len(some)):
            if i not in other:
                ours, theirs = values(got.logprobs[i]), values(want.logprobs[i])
                assert ours == pytest.approx(theirs, abs=1e-4)
        for i in other:  # both continue from the CPU's token
            slot = some[i]
            output = cpu.contexts[slot][len(prompts[slot]) :]
            gpu.admit(slot, samplings[slot], prompts[slot], output)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token_are_found_on_the_device(temperature: float) -> None:
    driver = SamplerDriver(3, 1000, "cuda", forbid_waiting)
    for slot in range(3):
        driver.admit(slot, SamplingParams(9, temperature, top_p=0.9, presence_penalty=1.0), [slot])
    logits = {slot: torch.randn(1000) for slot in range(3)}
    logits[0][5] = float("nan")
    tokens = driver.step(logits, token_masks({2: []}, 1000)).tokens
    assert [token == NO_TOKEN for (token,) in tokens] == [True, False, True]
