"""Adds up the time of each kernel in traces of torch's profiler, and prints those with the largest shares.

    python bench/serving/bench_one_batch.py ... --profile DIR; python bench/serving/kernel_shares.py DIR/prefill_8.json

or from a trace of /start_profile. The time of a kernel counts from the end of those before it: a kernel that is launched
early (`pdl.py`) waits for them, and one on a second stream (`beside.py`) runs beside them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

from gpu_idle import WORK

NAME_LENGTH = 60
LAST = "_best_of_row_kernel"  # of `kernels/sampling/sample.py`


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--top", type=int, default=25, help="kernels to list")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def shares(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the kernels of a Chrome trace's `events`, the longest first, with launches and us in a step, and the us
    of idle time. The kernel LAST runs once in each step that samples: it writes the tokens to the host's memory."""
    work = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in WORK
    )
    if not work:
        raise SystemExit("no GPU work in this trace")
    busy_until = begin = work[0][0]
    spent: defaultdict[str, float] = defaultdict(float)
    launches: defaultdict[str, int] = defaultdict(int)
    idle, steps = 0.0, 0
    for start, end, name in work:
        idle += max(start - busy_until, 0.0)
        spent[name] += max(end - max(start, busy_until), 0.0)
        launches[name] += 1
        steps += name == LAST
        busy_until = max(busy_until, end)
    steps = max(steps, 1)
    longest = sorted(spent, key=lambda name: -spent[name])
    return {
        "steps": steps,
        "step_us": round((busy_until - begin) / steps, 1),
        "idle_us": round(idle / steps, 1),
        "kernels": [
            {
                "name": short(name),
                "launches": round(launches[name] / steps, 2),
                "us": round(spent[name] / steps, 1),
            }
            for name in longest
        ],
    }


def short(name: str) -> str:
    """Returns the name without return type, arguments and namespaces."""
    plain = re.sub(r"^void |\(anonymous namespace\)::|at::native::", "", name)
    return plain[:NAME_LENGTH]


def main() -> None:
    args = parse_args()
    rows = []
    for path in args.traces:
        row = shares(json.loads(path.read_text())["traceEvents"])
        row["kernels"] = row["kernels"][: args.top]
        rows.append({"trace": path.name} | row)
        print(f"{path.name}: {row['step_us']:,.0f} us a step, idle {row['idle_us']:,.0f}")
        for kernel in row["kernels"]:
            share = kernel["us"] / row["step_us"]
            each = kernel["us"] / max(kernel["launches"], 1e-9)
            print(
                f"  {share:6.1%} {kernel['us']:10.1f} us  {kernel['launches']:7.1f} x {each:8.2f}  {kernel['name']}"
            )
    record("kernel_shares", {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
