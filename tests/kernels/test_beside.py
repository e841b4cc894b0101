"""Both pieces of work see the same input."""

from __future__ import annotations

import torch

from mla_router.worker.kernels.side_by_side import side_by_side


def test_both_results() -> None:
    x = torch.arange(6.0).view(3, 2)
    one, other = side_by_side(x, lambda x: x + 1, lambda x: x * 2)
    assert torch.equal(one, x + 1) and torch.equal(other, x * 2)
