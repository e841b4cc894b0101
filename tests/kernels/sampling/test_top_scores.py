"""The best tokens of rows of logits: the first is the sampled one, the others follow by their scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mla_router.worker.kernels.sampling.noise import gumbel
from mla_router.worker.kernels.sampling.sample import sample_torch
from mla_router.worker.kernels.sampling.top_scores import top_scores_torch, top_scores_triton
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

VOCAB, COUNT = 5000, 5


@pytest.mark.parametrize("op", [top_scores_torch, top_scores_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_best_tokens(
    op: Callable[..., tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(6, VOCAB, generator=draw)).to(dtype)
    logits[1, 7:] = float("-inf")
    temperature = torch.tensor([0.0, 0.0, 0.7, 1.0, 1e6, 2.0])
    seed, positions = torch.arange(6) * 77, torch.arange(6, dtype=torch.int32) * 5
    tokens, shares = op(*(x.to(DEVICE) for x in (logits, positions, temperature, seed)), COUNT)
    scores = logits.double()
    random = temperature > 0
    noise = gumbel(seed, positions.long(), VOCAB).double()
    scores[random] = scores[random] / temperature[random, None] + noise[random]
    ordered = scores.sort(dim=1, descending=True, stable=True)
    # Of equal logits, which bfloat16 has, any comes first
    if dtype == torch.float32:
        assert torch.equal(tokens.cpu(), ordered.indices[:, :COUNT])
    expected = ordered.values[:, :COUNT] - scores.logsumexp(dim=1, keepdim=True)
    torch.testing.assert_close(shares.cpu().double(), expected, atol=1e-4, rtol=1e-5)
    sampled = torch.empty(6, dtype=torch.int32)
    state = positions.clone(), temperature, seed, None, torch.zeros(6, dtype=torch.int64)
    sample_torch(logits, torch.arange(6), *state, sampled)
    assert torch.equal(tokens[random.to(DEVICE), 0].cpu(), sampled[random].long())


def launches() -> None:
    with torch.device("meta"):
        logits, positions = torch.empty(4, 128_256), torch.empty(4, dtype=torch.int32)
        top_scores_triton(logits, positions, positions.float(), positions.long(), 4)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
