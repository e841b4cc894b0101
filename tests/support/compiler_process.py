"""One process that compiles the kernels of all tests of a run: torch and Triton are imported once.

It runs without TRITON_INTERPRET and forks for each call, so that calls do not affect each other. Triton's cache on
disk is `target/triton`: a second run compiles only kernels whose source, constants or compiler have changed.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from mla_router.worker.lasting_imports import lasting_imports

CACHE = Path(__file__).resolve().parents[2] / "target" / "triton"
UNUSED_S = 14 * 24 * 3600.0  # after which a compiled kernel is removed


class CompilationFailed(Exception):
    """A failed compilation, with the last 4,000 characters of stderr."""


def compiling_environment() -> dict[str, str]:
    """Returns the environment of a process with this one's import path, in which Triton compiles. Line numbers would take
    a twentieth of the time."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_DISABLE_LINE_INFO": "1"}
    return environment | own


def remove_unused(cache: Path) -> None:
    """Removes the kernels that no run has used for a long time. Other processes may do the same."""
    oldest = time.time() - UNUSED_S
    for kernel in cache.iterdir() if cache.exists() else ():
        with suppress(FileNotFoundError):
            if kernel.stat().st_mtime < oldest:
                shutil.rmtree(kernel, ignore_errors=True)


class CompilerProcess:
    def __init__(self) -> None:
        remove_unused(CACHE)
        self._folder = tempfile.TemporaryDirectory(prefix="mla-test-compiler-")
        folder = Path(self._folder.name)
        self._result, self._errors = folder / "result.json", folder / "stderr"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.compiler_process", self._result, self._errors],
            env=compiling_environment() | {"TRITON_CACHE_DIR": str(CACHE)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._calls = 0

    def call(self, source: str, name: str) -> list[dict[str, Any]]:
        """Returns the fields of the reports on all launches of the function `name` in the file `source`.

        Raises CompilationFailed if the function raises.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._calls += 1
        print(json.dumps([self._calls, source, name]), file=self._process.stdin, flush=True)
        number, status = 0, 1
        while number < self._calls:  # skips the answer to an interrupted test
            line = self._process.stdout.readline()
            assert line, "the compiler process has ended"
            number, status = json.loads(line)
        if status:
            raise CompilationFailed(self._errors.read_text(errors="replace")[-4000:])
        reports: list[dict[str, Any]] = json.loads(self._result.read_text())
        return reports

    def close(self) -> None:
        self._process.communicate()  # the process ends with its input
        self._folder.cleanup()


@cache
def compiler_process() -> CompilerProcess:
    process = CompilerProcess()
    atexit.register(process.close)
    return process


def _serve(result: Path, errors: Path) -> None:
    """Answers each call on stdin with a line on stdout: its number and the exit status of its fork."""
    with lasting_imports():  # also: the collections of a fork skip what it shares
        import hypothesis  # noqa: F401  # with torch and Triton, most of what test modules import
        import pytest  # noqa: F401
        import torch._dynamo  # noqa: F401  # which the first quotient of meta tensors imports
        from triton.runtime.cache import triton_key

        triton_key()  # a hash of the compiler, which otherwise each fork computes
        import mla_router.worker.engine.loader  # noqa: F401  # all kernels
    for line in sys.stdin:
        number, source, name = json.loads(line)
        child = os.fork()
        if child == 0:
            _compile(result, errors, source, name)
            # The end of an interpreter with torch takes longer than most compilations.
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(json.dumps([number, os.waitstatus_to_exitcode(status)]), flush=True)


def _compile(result: Path, errors: Path, source: str, name: str) -> None:
    """Imports the file and writes the reports to `result`. Output goes to `errors`."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from support.sm90 import compile_here

    spec = importlib.util.spec_from_file_location("launches_for_sm90", source)
    assert spec is not None and spec.loader is not None, source
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    reports = [asdict(report) for report in compile_here(getattr(module, name))]
    result.write_text(json.dumps(reports))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
