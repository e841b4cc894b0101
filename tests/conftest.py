"""For all tests: those marked `gpu` are skipped without a CUDA device, Ctrl-C is heard, and a busy
machine fails nobody."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings


def pytest_configure() -> None:
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


def _has_cuda() -> bool:
    import torch  # seconds: only for a run that has such tests

    return torch.cuda.is_available()
