"""Random configs of every family against transformers, by each way into the cache."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch

from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.loader import load_model
from support.forward_driver import ForwardDriver
from support.random_configs import random_config
from support.reference import Continuation, Reference
from support.tiny_model import VOCAB_SIZE, write_tiny_model

SEEDS = range(8)
TOLERANCE = 1e-4  # of a logprob, unless float32 itself rounds the reference by more
NEW_TOKENS = 8


@dataclass(frozen=True)
class Case:
    ours: CausalLM
    draw: Random
    prompt: list[int]
    answer: Continuation
    # [prompt + answer, vocab]: after each token
    expected: torch.Tensor
    tolerance: float  # of a logprob

    def check(self, got: torch.Tensor, first: int) -> None:
        """Compares the rows `got`, from `first` on."""
        wanted = self.expected[first : first + len(got)]
        difference = (got - wanted).abs().max().item()
        assert difference <= self.tolerance, difference

    def finish(self, driver: ForwardDriver, slot: int, after_prompt: torch.Tensor) -> None:
        """Decodes greedily from the last row of the prompt on."""
        row = after_prompt[-1]
        for i, token in enumerate(self.answer.tokens):
            assert int(row.argmax()) == token, f"token {i}, margin {self.answer.margin:.1e}"
            row = driver.step({slot: token})[0]
            self.check(row[None], len(self.prompt) + i)


@pytest.fixture(scope="module", params=SEEDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("model")
    draw = Random(request.param)
    write_tiny_model(folder, seed=request.param, **random_config(request.param))
    # In float64: a random model magnifies rounding, also the rounding of a float32 reference.
    reference = Reference(folder, torch.float64)
    prompt = draw.choices(range(VOCAB_SIZE), k=draw.randint(40, 100))
    answer = reference.greedy(prompt, NEW_TOKENS)
    ours = load_model(folder, device="cpu", dtype=torch.float32)
    expected = reference.logprobs(prompt + answer.tokens)
    rounded = Reference(folder).logprobs(prompt + answer.tokens)
    tolerance = max(TOLERANCE, 2 * float((rounded - expected).abs().max()))
    return Case(ours, draw, prompt, answer, expected, tolerance)


@pytest.mark.parametrize("page_size", [1, 16])
def test_in_one_go_in_chunks_and_from_the_cache(case: Case, page_size: int) -> None:
    driver = ForwardDriver(case.ours, page_size=page_size, seed=page_size)
    whole = driver.step(chunks=[(0, case.prompt)])
    case.check(whole, 0)
    case.finish(driver, 0, whole)

    begin = 0
    while begin < len(case.prompt):
        run = case.prompt[begin : begin + case.draw.choice([1, 5, 16, 30])]
        chunk = driver.step(chunks=[(1, run)])
        case.check(chunk, begin)
        begin += len(run)
    case.finish(driver, 1, chunk)

    # Begins with pages that a prompt and decode steps have filled.
    sequence = case.prompt + case.answer.tokens
    for slot, tokens in ((2, case.prompt), (3, sequence)):
        cached = driver.share(0, slot, (len(tokens) - 1) // page_size)
        rest = driver.step(chunks=[(slot, tokens[cached:])])
        case.check(rest, cached)
        if slot == 2:
            case.finish(driver, 2, rest)
