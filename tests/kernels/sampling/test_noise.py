"""Gumbel noise against SplitMix64 in Python's integers."""

from __future__ import annotations

import math

import pytest
import torch

from mla_router.worker.kernels.sampling.noise import gumbel

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
# Of this seed, position and token the 23 bits are all 0.
SEED, POSITION, TOKEN = 37, 55, 46


def mix(x: int) -> int:
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def bits(seed: int, position: int, token: int) -> int:
    row = mix((mix(seed & MASK) + position * GOLDEN) & MASK)
    return mix((row + token * GOLDEN) & MASK) >> 41


@pytest.mark.parametrize("seed", [0, 1, SEED, 2**63 - 1, -1])
def test_noise_is_a_function_of_seed_position_and_token(seed: int) -> None:
    positions = [0, 1, POSITION, 100_000]
    got = gumbel(torch.tensor([seed] * 4), torch.tensor(positions), 50)
    for row, position in zip(got.tolist(), positions, strict=True):
        expected = [
            -math.log(-math.log((bits(seed, position, token) + 0.5) / 2**23)) for token in range(50)
        ]
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_noise_is_finite_where_all_bits_are_0() -> None:
    assert bits(SEED, POSITION, TOKEN) == 0
    got = gumbel(torch.tensor([SEED]), torch.tensor([POSITION]), TOKEN + 1)[0, TOKEN].item()
    assert got == pytest.approx(-math.log(24 * math.log(2)), abs=1e-4)
