"""Runs pytest in forks of a process that has imported the libraries, but nothing of the package."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# All that take long to import.
LIBRARIES = (
    "hypothesis",
    "msgspec",
    "numpy",
    "transformers",
    "triton",
    "xgrammar",
    "zmq",
    "aiohttp",
)
# Of one test, in addition to ten times its usual seconds. A mutant that hangs is found, too.
LONGEST_S = 10.0
TIMED_OUT = 124  # exit status
LONGEST_MEASURING_S = 1800.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The tests that run each line of each source, and the seconds of each test."""

    tests: dict[str, dict[str, list[str]]]  # by file and line; the test "" stands for the import
    seconds: dict[str, float]

    @staticmethod
    def read(file: Path) -> Measured:
        return Measured(**json.loads(file.read_text()))


class WarmTests:
    """The tests of one checkout, run one process after the other."""

    def __init__(self, tree: Path, coverage: Path) -> None:
        sys.path.insert(0, str(coverage))
        # As in tests/conftest.py, which is read after torch's import here.
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # Processes that tests start would import the checkout that is installed
        os.environ["PYTHONPATH"] = str(tree / "python")
        for name in ("torch", *LIBRARIES):
            importlib.import_module(name)
        self.tree = tree
        self.log = tree.parent / "pytest.log"

    def measure(self, tests: Sequence[str], sources: Sequence[str], file: Path) -> None:
        """Runs all tests, and writes which lines of the sources each of them runs."""
        status = self._fork(lambda: self._measure(tests, sources, file), LONGEST_MEASURING_S)
        assert status == 0, f"tests fail without a mutant: see {self.log}"

    def run(self, seconds: dict[str, float]) -> str:
        """Runs the tests, fastest first, up to the first failure. Returns `killed`, `timeout` or `survived`."""
        order = sorted(seconds, key=lambda test: (seconds[test], test))
        files = sorted({test.partition("::")[0] for test in order})

        def child() -> int:
            sys.dont_write_bytecode = True  # of the mutant
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            return _pytest(["-x", *files], Selection(order, seconds))

        status = self._fork(child, LONGEST_MEASURING_S)
        if status in (None, TIMED_OUT):
            return "timeout"
        assert status not in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED), (
            f"see {self.log}"
        )
        return "killed" if status else "survived"

    def _measure(self, tests: Sequence[str], sources: Sequence[str], file: Path) -> int:
        from coverage import Coverage

        paths = [self.tree / source for source in sources]
        include = [f"{path}/*" if path.is_dir() else str(path) for path in paths]
        coverage = Coverage(data_file=None, include=include)
        coverage.start()
        contexts = Contexts(coverage)
        status = _pytest(list(tests), contexts)
        coverage.stop()
        data = coverage.get_data()
        covering = {
            str(Path(name).relative_to(self.tree)): data.contexts_by_lineno(name)
            for name in data.measured_files()
        }
        file.write_text(json.dumps({"tests": covering, "seconds": contexts.seconds}))
        return status

    def _fork(self, work: Callable[[], int], limit_s: float) -> int | None:
        """Returns the status of the child; None if it took too long. Its processes end with it."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                os.setsid()
                os.chdir(self.tree)
                log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(log, 1)
                os.dup2(log, 2)
                status = int(work())
            finally:
                os._exit(status)
        ends = time.monotonic() + limit_s
        status = None
        while status is None and time.monotonic() < ends:
            ended, word = os.waitpid(pid, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(word)
            else:
                time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if status is None:
            os.waitpid(pid, 0)
        return status


class Selection:
    """A plugin that runs the named tests alone, in that order, and ends the process if one takes too long."""

    def __init__(self, order: Sequence[str], seconds: dict[str, float]) -> None:
        self._order = {test: place for place, test in enumerate(order)}
        self._seconds = seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        limit = LONGEST_S + 10 * self._seconds[item.nodeid]
        timer = threading.Timer(limit, os._exit, [TIMED_OUT])
        timer.start()
        result = yield
        timer.cancel()
        return result


class Contexts:
    """A plugin that notes the seconds of each test, and tells coverage which test runs."""

    def __init__(self, coverage: Any) -> None:
        self._coverage = coverage
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        started = time.monotonic()
        result = yield
        self.seconds[item.nodeid] = round(time.monotonic() - started, 3)
        self._coverage.switch_context("")
        return result


def _pytest(words: list[str], plugin: object) -> int:
    return pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *words], plugins=[plugin])
