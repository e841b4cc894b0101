"""For all tests: without a CUDA device those marked `gpu` are skipped and Triton kernels are
interpreted, Ctrl-C is heard, and a busy machine fails nobody."""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings


def pytest_configure() -> None:
    if not _has_cuda():
        # Triton looks when it is imported. Workers that tests start inherit it, and never notice:
        # on a CPU they use no Triton kernel.
        os.environ["TRITON_INTERPRET"] = "1"
    # A shell's background jobs ignore Ctrl-C, and what they start inherits that: tests that send
    # it to their children would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("unhurried", deadline=None)  # by default an example has 200 ms
    settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@cache
def _has_cuda() -> bool:
    if not Path("/proc/driver/nvidia/version").exists():
        return False  # no driver: it takes no import of torch, some seconds, to know
    import torch

    return torch.cuda.is_available()
