"""Mutation testing: single changes to the sources, each of which some test should find.

    python tests/mutants/run.py rust --sample 40
    python tests/mutants/run.py python --sample 40 --files worker/scheduler/admission.py
    python tests/mutants/run.py rust --shard 3/20

Works in a copy of the checkout. The mutants are cargo-mutants' and cosmic-ray's, in the versions below, which are
installed in target/mutants at first. Of them `--shard K/N` takes every N-th; `--sample` draws about so many.
Prints those that no test has found, and appends the score to `bench/results/mutants.jsonl` (`--out` for another file).
All of them take hours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from record import record

TOOLS = ROOT / "target" / "mutants"
CARGO_MUTANTS, COSMIC_RAY = "27.1.0", "8.7.0"
RUST_FILES = [
    f"router/src/{folder}/**/*.rs" for folder in ["tree", "correct", "policy", "proxy", "body"]
]
# Of the router's tests those that take seconds; the simulation of whole fleets is left out
RUST_TESTS = ["--lib", "--test", "serving", "--test", "correction", "--test", "bookings"]
LONGEST_S = 300  # of one run of the tests: a mutant that hangs is found, too


@dataclass(frozen=True)
class Area:
    """Python sources, and the tests that should find their mutants."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = (
    Area(("worker/scheduler",), ("tests/scheduler",)),
    Area(
        (
            "worker/engine/sampling",
            "worker/server/validation/sampling.py",
            "worker/kernels/sampling/noise.py",
        ),
        (
            "tests/engine/sampling",
            "tests/server/validation/test_sampling.py",
            "tests/kernels/sampling",
        ),
    ),
)


@dataclass(frozen=True)
class Choice:
    """Which of the mutants are run."""

    shard: int
    shards: int
    sample: int | None
    seed: int

    def of(self, count: int) -> list[int]:
        """Numbers below `count`: every `shards`-th from `shard` on, and of those a random sample."""
        found = range(self.shard, count, self.shards)
        size = min(len(found), self.sample or count)
        return sorted(random.Random(self.seed).sample(found, size))

    def shard_of(self, count: int) -> str:
        """The same for a program that takes shards alone: a sample is a shard drawn at random."""
        if self.sample is None:
            return f"{self.shard}/{self.shards}"
        shards = max(count // self.sample, 1)
        return f"{random.Random(self.seed).randrange(shards)}/{shards}"


def run(*command: str | Path, cwd: Path, check: bool = True) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | {"CARGO_TARGET_DIR": str(TOOLS / "target")},
        check=check,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def copy_of_checkout(folder: Path) -> Path:
    """The files that git knows, as they are now, and the router's extension."""
    tree = folder / "checkout"
    names = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in [*names, "python/mla_router/_router.abi3.so"]:
        source = ROOT / name
        if name and source.exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tree / name, follow_symlinks=False)
    return tree


def rust(tree: Path, files: Sequence[str], choice: Choice) -> tuple[Counter[str], list[str]]:
    """Return the number of mutants by outcome, and the names of the missed ones."""
    cargo_mutants = TOOLS / "bin" / "cargo-mutants"
    if not cargo_mutants.exists():
        install = ("cargo", "install", "--locked", "--root", TOOLS, "--version", CARGO_MUTANTS)
        run(*install, "cargo-mutants", cwd=ROOT)
    globs = [word for file in files or RUST_FILES for word in ("--file", file)]
    command = (cargo_mutants, "mutants", "--package", "mla-router", *globs)
    count = len(json.loads(run(*command, "--list", "--json", cwd=tree)))
    shard = ("--shard", choice.shard_of(count), "--sharding", "round-robin")
    options = ("--in-place", "--baseline=run", f"--timeout={LONGEST_S}", "--output", tree.parent)
    tests = ("--", "--locked", *RUST_TESTS)
    run(*command, *shard, *options, *tests, cwd=tree, check=False)
    outcomes = json.loads((tree.parent / "mutants.out" / "outcomes.json").read_text())["outcomes"]
    by_name = {
        outcome["scenario"]["Mutant"]["name"]: outcome["summary"]
        for outcome in outcomes
        if outcome["scenario"] != "Baseline"
    }
    assert by_name, "the tests fail without a mutant; see above"
    missed = [name for name, summary in by_name.items() if summary == "MissedMutant"]
    kinds = {"CaughtMutant": "killed", "Timeout": "killed", "MissedMutant": "survived"}
    return Counter(kinds.get(summary, "unviable") for summary in by_name.values()), missed


def python(tree: Path, files: Sequence[str], choice: Choice) -> tuple[Counter[str], list[str]]:
    """Return the same for the worker."""
    interpreter = TOOLS / "bin" / "python"
    if not interpreter.exists():
        uv = ROOT / ".venv" / "bin" / "uv"
        run(uv, "venv", "--quiet", "--allow-existing", TOOLS, cwd=ROOT)
        install = (uv, "pip", "install", "--system-certs", "--python", interpreter)
        run(*install, f"cosmic-ray=={COSMIC_RAY}", cwd=ROOT)
    wanted = {
        "areas": [
            {
                "sources": area.sources,
                "command": f"{sys.executable} -m pytest -x -q -n 0 {' '.join(area.tests)}",
            }
            for area in AREAS
        ],
        "files": list(files),
        "timeout": LONGEST_S,
    }
    program = (interpreter, Path(__file__).with_name("cosmic.py"))
    count = int(run(*program, "count", json.dumps(wanted), cwd=tree))
    wanted["chosen"] = choice.of(count)
    results = json.loads(run(*program, "run", json.dumps(wanted), cwd=tree))
    missed = [result["name"] for result in results if result["outcome"] == "survived"]
    return Counter(result["outcome"] for result in results), missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("side", choices=("rust", "python"))
    parser.add_argument(
        "--files", nargs="*", default=[], help="in place of all: paths, or globs for rust"
    )
    parser.add_argument("--shard", default="0/1", metavar="K/N")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "mutants.jsonl")
    arguments = parser.parse_args()
    shard, shards = map(int, arguments.shard.split("/"))
    choice = Choice(shard, shards, arguments.sample, arguments.seed)
    with tempfile.TemporaryDirectory(prefix="mla-mutants-") as folder:
        tree = copy_of_checkout(Path(folder))
        side = rust if arguments.side == "rust" else python
        outcomes, missed = side(tree, arguments.files, choice)
    for name in missed:
        print(f"survived: {name}")
    judged = outcomes["killed"] + outcomes["survived"]
    result = {
        "side": arguments.side,
        "files": arguments.files or "all",
        "seed": arguments.seed,
        "mutants": judged,
        "killed": outcomes["killed"],
        "unviable": outcomes["unviable"],
        "score": round(outcomes["killed"] / judged, 3) if judged else None,
        "survived": missed,
    }
    record("mutants", result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
