"""One process that compiles the kernels of all tests of a run: torch and Triton are imported once.

It runs without TRITON_INTERPRET and forks for each call, so that calls do not affect each other. Triton's
cache on disk is a separate folder, which is removed at the end of the run.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any


class CompilationFailed(Exception):
    """A failed compilation, with the last 4,000 characters of stderr."""


def compiling_environment() -> dict[str, str]:
    """Returns the environment of a process with this one's import path, in which Triton compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join(sys.path)}


class CompilerProcess:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mla-test-compiler-")
        folder = Path(self._folder.name)
        self._result, self._errors = folder / "result.json", folder / "stderr"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.compiler_process", self._result, self._errors],
            env=compiling_environment() | {"TRITON_CACHE_DIR": str(folder / "triton")},
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
    import hypothesis  # noqa: F401  # with torch and Triton, most of what test modules import
    import pytest  # noqa: F401
    import torch  # noqa: F401
    import triton  # noqa: F401

    for line in sys.stdin:
        number, source, name = json.loads(line)
        child = os.fork()
        if child == 0:
            _compile(result, errors, source, name)
            return
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
