"""Reports a soak: tables of the faults and of the ends of requests, and one JSON line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import record

PROBLEMS = 20  # limit of printed problems
PROBLEM_WIDTH = 300


def report(
    bench: str, result: dict[str, Any], out: Path | None, *, tables: Sequence[str], summary: str
) -> int:
    """Prints the named tables of `result`, its problems and `summary`, and records the result. Returns the exit
    status: 1 if there are problems."""
    for table in tables:
        print(table)
        for name, value in result[table].items():
            print(f"  {name:<40}{value:>8}")
    problems = dict(Counter(result["problems"]).most_common(PROBLEMS))
    for problem, count in problems.items():
        print(f"  {count} x {problem[:PROBLEM_WIDTH]}")
    print(summary)
    record(bench, result | {"problems": problems}, out)
    return 1 if problems else 0
