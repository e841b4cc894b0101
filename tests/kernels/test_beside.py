"""beside runs the work once, on its argument."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.beside import Fork, beside


def test_result() -> None:
    calls = []

    def work(x: Tensor) -> Tensor:
        calls.append(x)
        return x * 2

    x = torch.arange(6.0).view(3, 2)
    for start in (lambda: beside(x, work), lambda: Fork(x).start(work)):
        result = start()
        assert torch.equal(result(), x * 2)
    assert len(calls) == 2
