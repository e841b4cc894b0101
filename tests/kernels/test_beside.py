"""Fork runs the work once, on its argument."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.beside import Fork


def test_result() -> None:
    calls = []

    def work(x: Tensor) -> Tensor:
        calls.append(x)
        return x * 2

    x = torch.arange(6.0).view(3, 2)
    result = Fork(x).start(work)
    assert torch.equal(result(), x * 2)
    assert len(calls) == 1
