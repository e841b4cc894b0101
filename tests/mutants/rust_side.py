"""Mutants of the router's Rust sources, by cargo-mutants."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from mutant import Mutant, named

CARGO_MUTANTS = "27.1.0"
SOURCES = [f"router/src/{room}/**/*.rs" for room in ("tree", "correct", "policy", "proxy", "body")]
# In the order in which they are built and run, up to the first failure. Searches of interleavings are left out.
UNIT = ("--lib",)
MODELS = tuple(f"--test={name}" for name in ("tree_model", "choices", "correction", "load_guards"))
SERVING = ("--test=serving",)
LONGEST_S = {
    UNIT: 60,
    MODELS: 120,
    SERVING: 300,
}  # of the built tests; a mutant that hangs is found, too
OUTSIDE_MODELS = ("router/src/proxy/", "router/src/body/")  # no model test runs these
FAILED = re.compile(r"test (\S+).* \.\.\. FAILED$")


class RustSide:
    """Builds and tests in a copy of the checkout. `tools` is the folder of the installed tools."""

    def __init__(self, tree: Path, tools: Path) -> None:
        self.tree = tree
        self.program = tools / "bin" / "cargo-mutants"
        self.environment = os.environ | {
            "CARGO_TARGET_DIR": str(tools / "target"),
            "RUST_TEST_THREADS": "12",  # most tests wait for time limits
        }
        self.log = tree.parent / "cargo.log"
        self._tested = False
        self._finders: defaultdict[str, set[str]] = defaultdict(set)  # tests by file
        if not self.program.exists():
            install = (
                "cargo",
                "install",
                "--locked",
                "--debug",
                "--root",
                tools,
                "--version",
                CARGO_MUTANTS,
            )
            subprocess.run((*install, "cargo-mutants"), check=True)

    def mutants(self, files: Sequence[str]) -> dict[str, Mutant]:
        globs = [word for file in files or SOURCES for word in ("--file", file)]
        command = (self.program, "mutants", "--package", "mla-router", *globs, "--list", "--json")
        done = subprocess.run(command, cwd=self.tree, check=True, stdout=subprocess.PIPE, text=True)
        return named(self._read(found) for found in json.loads(done.stdout))

    def test(self, mutant: Mutant) -> str:
        """Returns `killed`, `timeout`, `survived`, or `unviable` if it does not compile."""
        if not self._tested:
            assert self._run("") == "survived", f"tests fail without a mutant: see {self.log}"
            self._tested = True
        path = self.tree / mutant.file
        before = path.read_text()
        path.write_text(mutant.tool)
        try:
            return self._run(mutant.file)
        finally:
            path.write_text(before)

    def _read(self, found: dict[str, Any]) -> tuple[str, str, int, str, str]:
        start, end = found["span"]["start"], found["span"]["end"]
        text = (self.tree / found["file"]).read_text()
        lines = text.splitlines(keepends=True)
        # Columns count characters from 1.
        first = sum(map(len, lines[: start["line"] - 1])) + start["column"] - 1
        last = sum(map(len, lines[: end["line"] - 1])) + end["column"] - 1
        mutated = text[:first] + found["replacement"] + text[last:]
        change = found["name"].partition(": ")[2]
        if found["genre"] != "FnValue":  # several of one function differ by their line
            change += f" in `{lines[start['line'] - 1].strip()}`"
        return found["file"], change, start["line"], found["name"], mutated

    def _run(self, file: str) -> str:
        for tests in (UNIT, MODELS, SERVING):
            if tests is MODELS and file.startswith(OUTSIDE_MODELS):
                continue
            if self._cargo("--no-run", *tests) != "passed":
                return "unviable"
            # Tests that found other mutants of this file are run first. Only of SERVING does that save time.
            finders = self._finders[file] if tests is SERVING else ()
            failed = self._failure(tests, finders) if finders else "passed"
            if failed == "passed":
                failed = self._failure(tests)
            if failed == "timeout":
                return "timeout"
            if failed != "passed":
                print(f"failed: {failed}")
                self._finders[file].add(failed)
                return "killed"
        return "survived"

    def _failure(self, tests: tuple[str, ...], only: Collection[str] = ()) -> str:
        """Returns the first test that fails, or `timeout`, or `passed`. A test must fail alone as well: some fail on a
        busy machine."""
        limit_s = LONGEST_S[tests]
        failed = "passed"
        for _ in range(3):
            failed = self._cargo(*tests, "--", "--exact", *only, limit_s=limit_s)
            if failed in ("passed", "timeout"):
                break
            if self._cargo(*tests, "--", "--exact", failed, limit_s=limit_s) != "passed":
                break
        return failed

    def _cargo(self, *words: str, limit_s: int = 0) -> str:
        """Returns `passed`, `timeout`, or the first test that failed. A build has no limit: its length says nothing about
        the mutant."""
        command = ("timeout", "--kill-after=5", str(limit_s), "cargo", "test", "--locked")
        with (
            self.log.open("w") as log,
            subprocess.Popen(
                (*command, "--package=mla-router", *words),
                cwd=self.tree,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if failed := FAILED.match(line):
                    process.terminate()  # and its children
                    return failed[1]
        if process.returncode in (124, 137):
            return "timeout"
        return "passed" if process.returncode == 0 else "the program"
