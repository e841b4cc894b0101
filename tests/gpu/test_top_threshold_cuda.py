"""top_threshold keeps the same tokens as the torch function on the CPU."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.sampling.top_threshold import top_threshold, top_threshold_torch
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1000, 102_400, 129_280])
@pytest.mark.parametrize("rows", [1, 32, 300])
def test_the_same_tokens_stay_as_on_the_cpu(rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    logits = (4 * torch.randn(rows, vocab_size)).to(dtype)
    logits[::7, : vocab_size // 2] = float("-inf")

    def some(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,))]

    inputs = (
        logits,
        some(0.0, 0.3, 0.8, 1.0),
        some(0, 1, 50, 5000).long(),
        some(1e-6, 0.5, 0.95, 1.0),
        some(0.0, 0.05),
    )
    on_gpu = [x.cuda() for x in inputs]
    with forbid_waiting():
        threshold = top_threshold(*on_gpu)
    want = top_threshold_torch(*inputs)
    wide = logits.float()
    differ = (wide >= threshold.cpu()[:, None]) != (wide >= want[:, None])
    # In a flat tail, sums in another order reach top_p some tokens sooner or later.
    kept = (wide >= want[:, None]).sum(dim=-1)
    # Equal logits stay or go together
    first = wide == torch.maximum(want, threshold.cpu())[:, None]
    assert (differ.sum(dim=-1) <= first.sum(dim=-1) * 4 + kept // 1000).all()


def test_in_a_cuda_graph() -> None:
    logits = torch.randn(8, 102_400, device="cuda")
    rows = torch.ones(8, device="cuda")
    top_k = torch.full((8,), 40, device="cuda")
    replay, threshold = captured(lambda: top_threshold(logits, rows, top_k, 0.9 * rows, 0 * rows))
    logits.copy_(torch.randn_like(logits))
    replay()
    assert torch.equal(threshold, top_threshold(logits, rows, top_k, 0.9 * rows, 0 * rows))
