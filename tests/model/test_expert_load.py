"""The counts of a model's gates, and the balancedness of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_router.worker.model.expert_load import ExpertLoad, count_experts
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.moe import MixtureOfExperts
from mla_router.worker.model.parallel.placement import trivial
from support.tiny_model import CONFIGS, write_tiny_model


def test_gates_count_in_their_layers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    model = load_model(tmp_path, device="cpu", dtype=torch.float32)
    assert model.expert_counts is None
    counts = count_experts(model)
    assert model.expert_counts is counts
    last = model.model.layers[-1].mlp
    assert isinstance(last, MixtureOfExperts)
    with torch.inference_mode():
        for _ in range(2):
            _, ids = last.gate(torch.randn(5, 64, generator=torch.Generator().manual_seed(0)))
    assert counts[:-1].sum() == 0
    assert counts[-1].tolist() == (2 * ids.flatten().bincount(minlength=8)).tolist()


def test_balancedness_of_the_pairs_between_two_looks() -> None:
    counts = torch.full((2, 4), 99)
    load = ExpertLoad(counts, trivial(2, 4, 2))
    assert load.read() == [[0] * 4] * 2  # those of first steps are not of requests
    assert load.balancedness() == 0.0
    counts[1] += torch.tensor([3, 0, 1, 0])
    looks = [load.balancedness() for _ in range(2)]
    assert looks == [0.0, pytest.approx(2 / 3)]
    counts[0] += torch.tensor([0, 0, 5, 0])
    looks = [load.balancedness() for _ in range(4)]
    assert looks == [pytest.approx(2 / 3), *[pytest.approx(0.5)] * 3]  # the last known one stays
    assert load.read() == [[0, 0, 5, 0], [3, 0, 1, 0]]
