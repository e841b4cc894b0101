"""The network that is trained is the one that is served."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import small_model
import torch
from network import Experts, Network, checkpoint
from safetensors.torch import save_file
from train import evaluate, initialize, losses, round_as_saved
from training import runs
from transformers import AutoModelForCausalLM

from mla_router.worker.config import SMALL_MODEL


def network() -> Network:
    torch.manual_seed(0)
    made = Network(small_model.CONFIG)
    initialize(made)
    for module in made.modules():
        if isinstance(module, Experts):
            module.bias.normal_(std=0.05)
    return made


@torch.no_grad()
def test_transformers_computes_the_same(tmp_path: Path) -> None:
    made = network()
    shutil.copy(SMALL_MODEL / "config.json", tmp_path)
    tensors = checkpoint(made, small_model.CONFIG)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == small_model.tensor_shapes(small_model.CONFIG)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    round_as_saved(made)
    tokens = torch.randint(0, small_model.CONFIG["vocab_size"], (2, 61))
    torch.testing.assert_close(made(tokens)[0], reference(tokens[:, :-1]).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_prediction_module_knows_the_next_token_and_no_later_one() -> None:
    made = network().eval()
    tokens = torch.randint(0, small_model.CONFIG["vocab_size"], (1, 20))
    changed = tokens.clone()
    changed[0, 10] += 1
    differ = (made(tokens)[1] - made(changed)[1]).abs().amax(dim=-1)[0] > 1e-5
    assert differ.tolist() == [False] * 9 + [True] * 10


def test_a_step_lowers_the_loss_and_balances_the_experts() -> None:
    made = network()
    tokens = torch.randint(0, 64, (2, 66))
    answers = torch.ones_like(tokens, dtype=torch.bool)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    seen = []
    for _ in range(5):
        loss, ahead = losses(made, tokens, answers)
        (loss + ahead).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    assert seen == sorted(seen, reverse=True)
    experts = next(module for module in made.modules() if isinstance(module, Experts))
    before = experts.bias.clone()
    experts.balance(0.01)
    busy = experts.load > experts.load.mean()
    assert ((experts.bias < before) == busy).all()


def test_runs() -> None:
    assert runs([False, True, True, False, True]) == [(1, 3), (4, 5)]
    assert runs([]) == []


@pytest.mark.slow
def test_an_untrained_network_is_mostly_wrong() -> None:
    """So the accuracies that training reports do not come from the questions alone."""
    args = Namespace(seed=1, eval_examples=1, out=SMALL_MODEL)
    scores = evaluate(network(), args)
    assert all(right < 0.5 for right, _ in scores.values())
