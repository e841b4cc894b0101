"""Settings of all tests. Without a CUDA device, tests marked `gpu` are skipped and Triton interprets its kernels.
Ctrl-C works, and neither a busy machine nor random examples fail a test.

Property tests have the same examples in every run; with `--hypothesis-profile=search` they draw more examples, anew in
each run. `--run-slow` adds the tests marked `slow`. `-n auto` spreads the tests over processes."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from mla_router.worker.host_limits import usable_cores, usable_memory
from support.distribution import spread
from support.examples import FACTOR, SEARCH
from support.procfs import descendants

pytest_plugins = ["support.servers"]

MAX_PROCESSES = 8  # each claims a range of ports (support/processes.py)
BYTES_OF_A_PROCESS = 3 << 30  # with its servers: each process has its own


@cache
def _has_cuda() -> bool:
    if not Path("/proc/driver/nvidia/version").exists():
        return False  # no driver: no need to import torch, which takes seconds
    import torch

    return torch.cuda.is_available()


# Not in a hook: torch and Triton read these at their import, and the conftest.py of a folder below
# may import them before any hook runs.
if not _has_cuda():
    # The workers of tests inherit it without effect: on a CPU they use no Triton kernel.
    os.environ["TRITON_INTERPRET"] = "1"
    # One thread: the rounding of sums depends on the number of threads. Threads also wait for each other after every
    # operation, which takes long on a busy machine.
    os.environ["OMP_NUM_THREADS"] = "1"


class Interruption:
    """Forwards a SIGTERM to the processes of xdist, and ends this process as Ctrl-C does.

    Running tests then end their processes.
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
    """Returns the number of processes of `-n auto`: half as many more than there are cores, and one, since tests wait for
    a third of their time; fewer if memory is short, and 0 (no further process) if tests share a GPU."""
    if _has_cuda():
        return 0
    cores = usable_cores()
    return max(1, min(cores + cores // 2 + 1, usable_memory() // BYTES_OF_A_PROCESS, MAX_PROCESSES))


def pytest_configure(config: pytest.Config) -> None:
    # Background jobs of a shell ignore Ctrl-C, and children inherit this. Tests that send Ctrl-C to children would
    # wait forever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, Interruption(config))
    # Hypothesis limits an example to 200 ms and the drawing of the first ten to 30 s by default.
    unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile(SEARCH, unhurried, derandomize=False, max_examples=100 * FACTOR)
    settings.register_profile("same", unhurried, derandomize=True)
    settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="tests marked `slow` as well")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported with the tests becomes garbage. To look for it takes half of the collection's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # nor later
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("--run-slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: `make test-all` runs it"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        items[:] = spread(items, processes)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Writes the reasons of skipped tests, with their counts, to the file $SKIPPED_TESTS, which `.ci/stages` prints at
    its end. The processes of pytest-xdist report to the main one."""
    path = os.environ.get("SKIPPED_TESTS")
    if not path or "PYTEST_XDIST_WORKER" in os.environ:
        return
    # The `longrepr` of a skip is (file, line, reason).
    skipped = (report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    with Path(path).open("a") as file:
        file.writelines(
            f"{number:6d}  {reason.removeprefix('Skipped: ')}\n"
            for reason, number in Counter(skipped).items()
        )
