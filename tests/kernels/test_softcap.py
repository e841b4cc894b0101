"""softcap_ against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.softcap import softcap_, softcap_triton_
from support.sm90 import compile_sm90
from support.triton_device import DEVICE


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("cap", [1.0, 30.0])
@pytest.mark.parametrize("shape", [(3, 1), (2, 2049), (0, 7)])
def test_formula(shape: tuple[int, int], cap: float) -> None:
    for op, device in ((softcap_, "cpu"), (softcap_triton_, DEVICE)):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 40
        x[:1, :1] = 1e30  # its exponential is infinite
        expected = cap * (x.double() / cap).tanh()
        given = x.to(device)
        got: Tensor = op(given, cap)
        assert got is given
        torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-5, atol=1e-5)


def launches() -> None:
    softcap_triton_(torch.empty(128, 256000), 30.0)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
