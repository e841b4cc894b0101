"""Why the flashinfer backend cannot be had is said when the worker starts."""

from __future__ import annotations

import sys

import pytest
import torch

from mla_router.worker.config import ConfigError
from mla_router.worker.engine.attention.flashinfer import RaggedWrappers, check_heads

CPU = torch.device("cpu")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"pip install 'mla-router\[flashinfer\]'"):
        RaggedWrappers(16, torch.bfloat16, CPU)


def test_heads_of_another_width() -> None:
    check_heads(192, 128)
    with pytest.raises(ConfigError, match=r"heads \(192, 128\) wide, not \(128, 128\)"):
        check_heads(128, 128)
