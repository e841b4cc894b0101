"""Sampling against the distributions that it must draw from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mla_router.worker.engine.sampling import logprobs_of, sample

DRAWS = 20000


def draw(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """Frequencies of DRAWS samples of one row, each at another position of one request."""
    rows = logits.expand(DRAWS, -1)
    tokens = sample(
        rows,
        torch.full((DRAWS,), temperature),
        torch.full((DRAWS,), top_k),
        torch.full((DRAWS,), top_p),
        torch.full((DRAWS,), 42),
        torch.arange(DRAWS),
        filtered=top_k > 0 or top_p < 1,
    )
    return np.bincount(tokens.numpy(), minlength=logits.shape[0]) / DRAWS


def expected(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """The filtered distribution, written down naively in float64."""
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
    return q / q.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.6},
        {"temperature": 1.5, "top_k": 10, "top_p": 0.8},
    ],
)
def test_frequencies_are_the_distribution(settings: dict[str, float]) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1)) * 1.5
    got, want = draw(logits, **settings), expected(logits, **settings)  # type: ignore[arg-type]
    assert (got[want == 0] == 0).all()
    # 5 standard deviations of a binomial proportion
    assert (np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / DRAWS) + 1e-9).all()


def test_temperature_zero_is_argmax_in_a_mixed_batch() -> None:
    logits = torch.randn(8, 100)
    temperature = torch.tensor([0.0, 1.0] * 4)
    ones, zeros = torch.ones(8), torch.zeros(8, dtype=torch.int64)
    tokens = sample(logits, temperature, zeros, ones, zeros, zeros, filtered=False)
    assert tokens[::2].tolist() == logits.argmax(-1)[::2].tolist()


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, seeds = torch.randn(16, 300), torch.randint(1 << 62, (16,))
    positions = torch.randint(1000, (16,))
    temperature, top_k, top_p = torch.rand(16) + 0.2, torch.randint(5, (16,)), torch.rand(16)
    together = sample(logits, temperature, top_k, top_p, seeds, positions, filtered=True)
    for i in reversed(range(16)):
        row = slice(i, i + 1)
        alone = sample(
            logits[row],
            temperature[row],
            top_k[row],
            top_p[row],
            seeds[row],
            positions[row],
            filtered=True,
        )
        assert alone.item() == together[i].item()


@pytest.mark.parametrize("changed", ["seed", "position"])
def test_noise_changes_with_seed_and_position(changed: str) -> None:
    rows = torch.arange(2000)
    zero, one = torch.zeros(2000, dtype=torch.int64), torch.ones(2000)
    seed, position = (rows, zero) if changed == "seed" else (zero, rows)
    tokens = sample(torch.zeros(2000, 64), one, zero, one, seed, position, filtered=False)
    counts = np.bincount(tokens.numpy(), minlength=64)
    chi_square = ((counts - 2000 / 64) ** 2 / (2000 / 64)).sum()
    assert chi_square < 63 + 6 * np.sqrt(2 * 63)  # uniform logits: every token as often


def test_extreme_logits_give_a_token_of_the_vocabulary() -> None:
    logits = torch.tensor([[1e30, 0, -1e30], [-1e38, -1e38, -1e38]])
    one, zero = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    tokens = sample(logits, one, zero, one * 0.5, zero, zero, filtered=True)
    assert tokens[0] == 0
    assert 0 <= tokens[1] < 3


def test_logprobs_are_those_of_log_softmax() -> None:
    logits = torch.randn(5, 40) * 10
    tokens = torch.randint(40, (5,))
    want = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    assert torch.allclose(logprobs_of(logits, tokens).double(), want, atol=1e-5)
