"""Our models against transformers in float32: the same tokens, log-probabilities within 1e-4."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.choose import choose_config
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.loader import load_model
from support.forward_driver import ForwardDriver
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Pair:
    ours: CausalLM
    reference: Any

    def expected(self, tokens: list[int]) -> Tensor:
        """Returns log-probabilities after each token, by one forward pass of transformers."""
        with torch.no_grad():
            return self.reference(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


# Served with --disable-mla as well
NON_ABSORBED = ("v2_lite", "v3_halves")


@pytest.fixture(
    scope="module", params=[*CONFIGS, *(f"{name} disable-mla" for name in NON_ABSORBED)]
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, _, disabled = request.param.partition(" ")
    folder: Path = tmp_path_factory.mktemp(name)
    write_tiny_model(folder, **CONFIGS[name])
    # torch's attention, the default, ignores soft caps
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    config = choose_config(WorkerConfig(model_path=str(folder), disable_mla=bool(disabled)))
    return Pair(load_model(folder, device="cpu", dtype=torch.float32, config=config), reference)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    difference = (actual - expected).abs().max().item()
    assert difference <= TOLERANCE, difference


@pytest.mark.parametrize("page_size", [1, 16])
def test_prefill_of_several_prompts_in_one_go(pair: Pair, page_size: int) -> None:
    prompts = [prompt(length, seed=length) for length in (37, 1, 200)]
    got = ForwardDriver(pair.ours, page_size=page_size).step(chunks=list(enumerate(prompts)))
    assert_close(got, torch.cat([pair.expected(tokens) for tokens in prompts]))


@pytest.mark.parametrize("page_size", [1, 16])
def test_prefill_in_chunks_of_16(pair: Pair, page_size: int) -> None:
    tokens = prompt(150, seed=1)
    driver = ForwardDriver(pair.ours, page_size=page_size, seed=2)
    got = [driver.step(chunks=[(3, tokens[i : i + 16])]) for i in range(0, len(tokens), 16)]
    assert_close(torch.cat(got), pair.expected(tokens))


def test_greedy_tokens_of_a_batch(pair: Pair) -> None:
    prompts = {slot: prompt(length, seed=length) for slot, length in enumerate((5, 64, 131))}
    steps = 12
    driver = ForwardDriver(pair.ours, page_size=16, seed=3)
    outputs: dict[int, list[int]] = {}
    for slot, tokens in prompts.items():
        outputs[slot] = [int(driver.step(chunks=[(slot, tokens)])[-1].argmax())]
    for _ in range(steps - 1):
        after = driver.step({slot: output[-1] for slot, output in outputs.items()})
        for output, token in zip(outputs.values(), after.argmax(dim=-1).tolist(), strict=True):
            output.append(token)
    for slot, tokens in prompts.items():
        generated = pair.reference.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=steps,
            min_new_tokens=steps,
            eos_token_id=[],
            pad_token_id=0,
        )
        assert outputs[slot] == generated[0, len(tokens) :].tolist()


@pytest.mark.parametrize(("page_size", "seed"), [(1, 4), (16, 5)])
def test_mixed_steps_of_decodes_and_chunks(pair: Pair, page_size: int, seed: int) -> None:
    """Four sequences advance at random, each by a chunk, by one token, or not at all."""
    draw = random.Random(seed)
    sequences = {slot: prompt(draw.randint(40, 160), seed + slot) for slot in range(4)}
    expected = {slot: pair.expected(tokens) for slot, tokens in sequences.items()}
    driver = ForwardDriver(pair.ours, page_size=page_size, seed=seed)
    mixed = 0
    while any(driver.lengths[slot] < len(tokens) for slot, tokens in sequences.items()):
        decodes, chunks, wanted_decodes, wanted_chunks = {}, [], [], []
        for slot in draw.sample(sorted(sequences), 4):
            begin = driver.lengths[slot]
            run = sequences[slot][begin : begin + draw.choice([0, 1, 1, 1, 7, 30])]
            rows = expected[slot][begin : begin + len(run)]
            if len(run) == 1 and begin > 0:
                decodes[slot] = run[0]
                wanted_decodes.append(rows)
            elif run:
                chunks.append((slot, run))
                wanted_chunks.append(rows)
        if decodes or chunks:
            mixed += bool(decodes and chunks)
            assert_close(driver.step(decodes, chunks), torch.cat(wanted_decodes + wanted_chunks))
    assert mixed > 3
