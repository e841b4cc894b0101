"""sample at the vocabularies of V2-Lite and V3 draws the same tokens as the torch function on the CPU."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.sampling.sample import sample, sample_torch
from mla_router.worker.step.result import NO_TOKEN
from support.cuda import captured, forbid_waiting
from support.drawing import draw, drawn, with_slots

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [102_400, 129_280])
@pytest.mark.parametrize("rows", [1, 32, 300])
def test_tokens_are_the_cpu_s(rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    logits = (4 * torch.randn(rows, vocab_size)).to(dtype)
    logits[0, 7] = float("nan")
    temperature = torch.tensor([0.0, 0.5, 1.0])[torch.arange(rows) % 3]
    seed, position = torch.randint(1 << 60, (2, rows))
    threshold = logits.float().mean(dim=-1)
    inputs = (logits, temperature, seed, position, threshold)
    arguments = with_slots(*(x.cuda() for x in inputs), out_on_host=True)
    with forbid_waiting():
        sample(*arguments)
    got = drawn(arguments).cpu()
    different = got != draw(sample_torch, *inputs)
    assert got[0] == NO_TOKEN
    # Logarithms of the two devices differ in the last bit, which may change the order of nearly equal scores.
    assert different.sum() <= rows // 100


def test_in_a_cuda_graph() -> None:
    logits = torch.randn(8, 102_400, device="cuda")
    rows = torch.arange(8, device="cuda")
    arguments = with_slots(logits, rows.float(), rows, rows, None)
    lengths = arguments[2].clone()
    replay, _ = captured(lambda: sample(*arguments))
    arguments[2].copy_(lengths)  # the first call has added to them
    logits.copy_(torch.randn_like(logits))
    replay()
    assert torch.equal(drawn(arguments), draw(sample, logits, rows.float(), rows, rows, None))
