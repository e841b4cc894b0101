"""For all tests: without a CUDA device those marked `gpu` are skipped and Triton kernels are
interpreted, Ctrl-C is heard, and neither a busy machine nor chance fails anybody.

The examples of property tests are the same in every run; `--hypothesis-profile=search` draws more and
others. `--run-slow` adds the tests marked `slow`. `-n auto` spreads the tests over processes,
one a core."""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.procfs import descendants

MOST_PROCESSES = 8  # each claims ports of its own (support/processes.py)


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


class Interruption:
    """Passes a SIGTERM on to the processes that xdist started, and ends this one as Ctrl-C does.

    Tests that are under way then end the processes that they have started.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._distributes = bool(config.getoption("numprocesses", None))

    def __call__(self, *_signal: object) -> None:
        own = os.getpid()
        for process in descendants(own) if self._distributes else ():
            if process.parent == own:
                os.kill(process.number, signal.SIGINT)
        raise KeyboardInterrupt


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the processes of `-n auto`: one a core, or none beside this one where tests share a GPU."""
    return 0 if _has_cuda() else min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background jobs ignore Ctrl-C, and what they start inherits that: tests that send
    # it to their children would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, Interruption(config))
    # By default an example has 200 ms, and the first ten may be drawn in 30 s.
    unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("search", unhurried, derandomize=False, max_examples=1000)
    settings.register_profile("same", unhurried, derandomize=True)
    settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="tests marked `slow` as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("--run-slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: `make test-all` runs it"))


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
