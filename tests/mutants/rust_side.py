"""Mutants of the router's Rust sources, by cargo-mutants."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutant import Mutant, named

CARGO_MUTANTS = "27.1.0"
SOURCES = [f"router/src/{room}/**/*.rs" for room in ("tree", "correct", "policy", "proxy", "body")]
# In the order in which they are built and run, up to the first failure. Searches of interleavings are left out.
TESTS = (
    ("--lib",),
    ("--test", "tree_model", "--test", "choices", "--test", "correction", "--test", "load_guards"),
    ("--test", "serving"),
)
LONGEST_S = 600.0  # of one run of built tests; a mutant that hangs is found, too


class RustSide:
    """Builds and tests in a copy of the checkout. `tools` is the folder of the installed tools."""

    def __init__(self, tree: Path, tools: Path) -> None:
        self.tree = tree
        self.program = tools / "bin" / "cargo-mutants"
        self.environment = os.environ | {"CARGO_TARGET_DIR": str(tools / "target")}
        self.log = tree.parent / "cargo.log"
        self._tested = False
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
            assert self._run() == "survived", f"tests fail without a mutant: see {self.log}"
            self._tested = True
        path = self.tree / mutant.file
        before = path.read_text()
        path.write_text(mutant.tool)
        try:
            return self._run()
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

    def _run(self) -> str:
        build = ("--locked", "--package", "mla-router")
        for tests in TESTS:
            if self._cargo("test", *build, "--no-run", *tests, limit_s=None) != 0:
                return "unviable"
            outcome = self._cargo("test", *build, *tests, limit_s=LONGEST_S)
            if outcome != 0:
                return "timeout" if outcome is None else "killed"
        return "survived"

    def _cargo(self, *words: str, limit_s: float | None) -> int | None:
        """Returns the status; None if it took longer than the limit. A build has none: its length says nothing about
        the mutant."""
        with self.log.open("w") as log:
            process = subprocess.Popen(
                ("timeout", "--kill-after=5", str(limit_s or 0), "cargo", *words),
                cwd=self.tree,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            status = process.wait()
        return None if status in (124, 137) else status
