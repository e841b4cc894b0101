"""softcap_ at the size of Gemma 2's logits."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.softcap import softcap_
from support.cuda import forbid_waiting

pytestmark = pytest.mark.gpu


def test_float64() -> None:
    x = 40 * torch.randn(128, 256000, device="cuda", generator=torch.Generator("cuda"))
    expected = 30 * (x.double() / 30).tanh()
    with forbid_waiting():
        softcap_(x, 30.0)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-5)
