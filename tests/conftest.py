"""For all tests: without a CUDA device those marked `gpu` are skipped and Triton kernels are
interpreted, Ctrl-C is heard, and neither a busy machine nor chance fails anybody.

The examples of property tests are the same in every run. `--hypothesis-profile=search` draws others."""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings


@cache
def _has_cuda() -> bool:
    if not Path("/proc/driver/nvidia/version").exists():
        return False  # no driver: it takes no import of torch, some seconds, to know
    import torch

    return torch.cuda.is_available()


# Here and not in a hook: torch and Triton look when they are imported, and conftest.py of a folder below
# may do that before there are hooks.
if not _has_cuda():
    # Workers that tests start inherit it, and never notice: on a CPU they use no Triton kernel.
    os.environ["TRITON_INTERPRET"] = "1"
    # Sums round as they are divided among threads: not as many as a machine has cores. And threads meet
    # after every operation, which takes long where other processes want those cores.
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure() -> None:
    # A shell's background jobs ignore Ctrl-C, and what they start inherits that: tests that send
    # it to their children would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # To end as after Ctrl-C: tests that are under way end the processes that they have started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # By default an example has 200 ms, and the first ten may be drawn in 30 s.
    unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("search", unhurried, derandomize=False)
    settings.register_profile("same", unhurried, derandomize=True)
    settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Append a line for each reason why tests were skipped to the file that $SKIPPED_TESTS names:
    `.ci/stages` ends with them."""
    if not (path := os.environ.get("SKIPPED_TESTS")):
        return
    # Of a skip, `longrepr` is (file, line, reason).
    skipped = (report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    with Path(path).open("a") as file:
        file.writelines(
            f"{number:6d}  {reason.removeprefix('Skipped: ')}\n"
            for reason, number in Counter(skipped).items()
        )
