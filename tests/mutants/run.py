"""Mutation testing: single changes to the sources, each of which some test should find.

    python tests/mutants/run.py python --sample 200 --seed 1
    python tests/mutants/run.py rust --sample 40 --seed 1 --minutes 60
    python tests/mutants/run.py python --files worker/scheduler/admission.py

A sample has one mutant of each place that is drawn, though an operator may have ten others.
Works in a copy of the checkout in target/mutants, where the tools are installed at first. Each mutant is tested by the
tests that run its line (Python) or by the tests of the package (Rust), fastest first, up to the first failure.

A run that was ended, by `--minutes` or otherwise, goes on when it is started again with the same options. Mutants that
survived are then tested again. Prints the mutants that no test has found, apart from those in `equivalent.toml`. The
score of those that were tested, a random part of the sample, goes to `bench/results/mutants.jsonl` (`--out` for another
file).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from mutant import Mutant, ResultsFile, equivalents
from python_side import PythonSide
from record import record
from rust_side import RustSide

TOOLS = ROOT / "target" / "mutants"


def copy_of_checkout(tree: Path) -> None:
    """Makes `tree` equal to the files that git knows, as they are now, and the router's extension.

    Equal files keep their time of change, for which compilers look.
    """
    done = subprocess.run(
        ("git", "ls-files", "-z"), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    names = [*done.stdout.split("\0"), "python/mla_router/_router.abi3.so"]
    names = [name for name in names if name and (ROOT / name).exists()]
    for folder in ("router", "worker", "tests"):
        for path in sorted((tree / folder).rglob("*.*")):
            if path.suffix in (".py", ".rs") and not (ROOT / path.relative_to(tree)).exists():
                path.unlink()
    for name in names:
        source, copy = ROOT / name, tree / name
        if copy.is_symlink() or (copy.exists() and copy.read_bytes() == source.read_bytes()):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy, follow_symlinks=False)


def test_all(
    side: PythonSide | RustSide, mutants: list[Mutant], journal: ResultsFile, minutes: float
) -> None:
    """Tests the mutants that have no outcome yet, or survived."""
    ends = time.monotonic() + 60 * minutes
    left_out = equivalents()
    for number, mutant in enumerate(mutants, 1):
        if journal.outcomes.get(mutant.name, "survived") != "survived" or mutant.name in left_out:
            continue
        if time.monotonic() > ends:
            return
        started = time.monotonic()
        outcome = side.test(mutant)
        journal.note(mutant.name, outcome)
        seconds = time.monotonic() - started
        print(f"{number}/{len(mutants)} {seconds:5.1f} s {outcome:8} {mutant.name}", flush=True)


def counted(names: list[str], journal: ResultsFile) -> dict[str, Any]:
    """Returns the mutants of each outcome, and the score: the share of killed mutants, without equivalent ones."""
    left_out = equivalents()
    outcomes = {name: journal.outcomes[name] for name in names if name in journal.outcomes}
    survived = sorted(n for n, outcome in outcomes.items() if outcome == "survived")
    missed = [name for name in survived if name not in left_out]
    counts = Counter(outcomes.values())
    killed = counts["killed"] + counts["timeout"]
    judged = killed + len(missed)
    untested = [name for name in names if name not in outcomes and name not in left_out]
    return {
        "untested": len(untested),
        "killed": killed,
        "timeouts": counts["timeout"],
        "unviable": counts["unviable"],
        "equivalent": sum(name in left_out for name in names),
        "score": round(killed / judged, 3) if judged else None,
        "survived": missed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("side", choices=("rust", "python"))
    parser.add_argument(
        "--files", nargs="*", default=[], help="in place of all: paths, or globs for rust"
    )
    parser.add_argument("--sample", type=int, help="the number of mutants (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the random sample")
    parser.add_argument("--minutes", type=float, default=1e6, help="no mutant begins later")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "mutants.jsonl")
    arguments = parser.parse_args()
    tree = TOOLS / arguments.side / "checkout"
    copy_of_checkout(tree)
    side = (
        RustSide(tree, TOOLS)
        if arguments.side == "rust"
        else PythonSide(tree, TOOLS, ROOT / ".venv" / "bin" / "uv")
    )
    mutants = side.mutants(arguments.files)
    part = "" if not arguments.files else "-" + "-".join(Path(f).stem for f in arguments.files)
    name = f"{arguments.side}{part}-{arguments.sample or 'all'}-{arguments.seed}.jsonl"
    journal = ResultsFile(TOOLS / "journals" / name)
    sample = journal.choose(mutants, arguments.sample, arguments.seed)
    test_all(side, sample, journal, arguments.minutes)
    result: dict[str, Any] = {
        "side": arguments.side,
        "files": arguments.files or "all",
        "places": len({mutant.place for mutant in mutants.values()}),
        "sample": len(sample),
        "seed": arguments.seed,
        **counted([mutant.name for mutant in sample], journal),
    }
    for name in result["survived"]:
        print(f"survived: {name}")
    record("mutants", result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
