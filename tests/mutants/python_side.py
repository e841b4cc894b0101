"""Mutants of the worker's Python sources, by cosmic-ray, and the tests that cover them."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mutant import Mutant, named
from warm import Measured, WarmTests

COSMIC_RAY, COVERAGE = "8.7.0", "7.17.4"
SOURCES = (
    "worker/scheduler",
    "worker/engine/sampling",
    "worker/server/validation/sampling.py",
    "worker/kernels/sampling/noise.py",
)
TESTS = (
    "tests/scheduler",
    "tests/engine/sampling",
    "tests/engine/speculation/test_trees.py",
    "tests/server/validation",
    "tests/kernels/sampling/test_noise.py",
)
# Sources that are run in processes as well, unseen by coverage, and the tests that start them.
IN_PROCESSES = {"worker/scheduler/": "tests/scheduler/test_process.py"}


class PythonSide:
    """Runs tests in a copy of the checkout. `tools` is the folder of the installed tools."""

    def __init__(self, tree: Path, tools: Path, uv: Path) -> None:
        self.tree = tree
        self.tools = tools
        self._install(uv)
        self._tests = WarmTests(tree, tools / "coverage")
        self._measured: Measured | None = None

    def mutants(self, files: Sequence[str]) -> dict[str, Mutant]:
        if not files:
            found = (self.tree / source for source in SOURCES)
            paths = [
                path for f in found for path in (sorted(f.rglob("*.py")) if f.is_dir() else [f])
            ]
            files = [str(path.relative_to(self.tree)) for path in paths]
        found = json.loads(self._cosmic("list", *files))
        return named(
            (
                file,
                self._change(file, operator, line, column),
                line,
                (file, line, column, operator.partition("_")[0]),
                (file, operator, str(occurrence)),
            )
            for file, operator, occurrence, line, column in found
        )

    def test(self, mutant: Mutant) -> str:
        """Returns `killed`, `timeout`, `survived`, or `unviable` if it does not compile."""
        text = self._cosmic("text", *mutant.tool)
        try:
            compile(text, mutant.file, "exec")
        except SyntaxError:
            return "unviable"
        tests = self._covering(mutant)
        path = self.tree / mutant.file
        before, times = path.read_text(), path.stat()
        path.write_text(text)
        try:
            return self._tests.run(tests) if tests else "survived"
        finally:
            path.write_text(before)
            # Python's bytecode of a file is valid for one time of change.
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _cosmic(self, *words: str) -> str:
        program = (self.tools / "python" / "bin" / "python", Path(__file__).with_name("cosmic.py"))
        done = subprocess.run(
            [*program, *words], cwd=self.tree, check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    def _change(self, file: str, operator: str, line: int, column: int) -> str:
        """Returns the operator and its place: the line, with a mark before the changed part."""
        text = (self.tree / file).read_text().splitlines()[line - 1]
        kind = operator.removeprefix("core/")
        return f"{kind} at `{text[:column].lstrip()}⟨{text[column:]}`"

    def _covering(self, mutant: Mutant) -> dict[str, float]:
        """Returns the tests that run the changed statement, with their seconds. Statements that run at the import are
        tested by all tests that run any line of the file."""
        measured = self._measure()
        by_line = measured.tests.get(mutant.file, {})
        source = (self.tree / mutant.file).read_text()
        lines = statement(source, mutant.line)
        tests = {test for line in lines for test in by_line.get(str(line), ())}
        if "" in tests:
            tests = {test for covering in by_line.values() for test in covering}
        seconds = measured.seconds
        for source, file in IN_PROCESSES.items():
            if mutant.file.startswith(source):
                tests |= {test for test in seconds if test.startswith(file)}
        return {test: seconds[test] for test in tests if test}

    def _measure(self) -> Measured:
        """Runs all tests without a mutant, unless they were run on the same files before."""
        if self._measured is None:
            digest = hashlib.sha256()
            for folder in ("worker", "tests"):
                for path in sorted((self.tree / folder).rglob("*.py")):
                    digest.update(path.read_bytes())
            kept = self.tools / f"covering-{digest.hexdigest()[:16]}.json"
            if not kept.exists():
                self._tests.measure(TESTS, SOURCES, kept)
            self._measured = Measured.read(kept)
        return self._measured

    def _install(self, uv: Path) -> None:
        if (self.tools / "coverage").exists():
            return
        python = self.tools / "python"
        install = (uv, "pip", "install", "--quiet", "--system-certs")
        for command in (
            (uv, "venv", "--quiet", "--allow-existing", python),
            (*install, "--python", python / "bin" / "python", f"cosmic-ray=={COSMIC_RAY}"),
            (*install, "--target", self.tools / "coverage", f"coverage=={COVERAGE}"),
        ):
            subprocess.run(command, check=True)


def statement(source: str, line: int) -> range:
    """Returns the lines of the innermost statement at `line`: the head alone of one that has a body."""
    best = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            continue
        first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
        body = getattr(node, "body", None)
        if isinstance(body, list):
            last = max(first, body[0].lineno - 1)
        else:
            last = node.end_lineno or first
        if first <= line <= last:
            best = range(first, last + 1)
    return best
