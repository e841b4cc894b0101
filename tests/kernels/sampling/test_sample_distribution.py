"""Draws of top_threshold and sample, against their distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.sampling.sample import sample
from mla_router.worker.kernels.sampling.top_threshold import top_threshold
from support.drawing import draw as draw_tokens

DRAWS = 20000


def draw(
    logits: Tensor,
    positions: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: Tensor | int = 42,
) -> Tensor:
    rows = torch.ones(len(logits))
    threshold = top_threshold(
        logits, temperature * rows, (top_k * rows).long(), top_p * rows, min_p * rows
    )
    seeds = torch.as_tensor(seed).expand(len(logits))
    return draw_tokens(sample, logits, temperature * rows, seeds, positions, threshold)


def expected(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Returns the filtered distribution in float64, by its definition."""
    p = np.exp(logits.double().numpy() / temperature)
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += p[token]
        if mass >= top_p:
            break
    q = np.zeros_like(p)
    q[kept] = p[kept]
    q[q < min_p * q.max()] = 0
    return q / q.sum()


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 10, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_frequencies_are_the_distribution(how: dict[str, float]) -> None:
    """Pearson's chi-square test; each draw is at another position of one request."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1)) * 1.5
    tokens = draw(logits.expand(DRAWS, -1), torch.arange(DRAWS), **how)  # type: ignore[arg-type]
    got = np.bincount(tokens.numpy(), minlength=20)
    want = expected(logits, **how) * DRAWS  # type: ignore[arg-type]
    assert (got[want == 0] == 0).all()
    kept = want > 0
    degrees = kept.sum() - 1
    chi_square = ((got - want)[kept] ** 2 / want[kept]).sum()
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("changed", ["seed", "position"])
def test_noise_changes_with_seed_and_position(changed: str) -> None:
    rows, zero = torch.arange(2000), torch.zeros(2000, dtype=torch.int64)
    seed, position = (rows, zero) if changed == "seed" else (zero, rows)
    tokens = draw(torch.zeros(2000, 64), position, seed=seed)
    counts = np.bincount(tokens.numpy(), minlength=64)
    chi_square = ((counts - 2000 / 64) ** 2 / (2000 / 64)).sum()
    assert chi_square < 63 + 6 * np.sqrt(2 * 63)  # uniform logits: every token as often


@pytest.mark.parametrize("how", [{"top_k": 2}, {"top_p": 0.3}])
def test_tokens_that_are_equally_likely_stay_together(how: dict[str, float]) -> None:
    logits = torch.tensor([0.0, 3, 3, 3, 3, -1])
    tokens = draw(logits.expand(500, -1), torch.arange(500), **how)  # type: ignore[arg-type]
    assert set(tokens.tolist()) == {1, 2, 3, 4}


def test_extreme_logits_give_a_token_of_the_vocabulary() -> None:
    logits = torch.tensor([[1e30, 0, -1e30], [-1e38, -1e38, -1e38]])
    tokens = draw(logits, torch.zeros(2, dtype=torch.int64), top_p=0.5, min_p=0.1)
    assert tokens[0] == 0
    assert 0 <= tokens[1] < 3
