"""Computes the time in which a GPU waited for its host, from a trace of torch's profiler.

    python bench/serving/bench_one_batch.py ... --profile DIR; python bench/serving/gpu_idle.py DIR/decode_*.json

or from a trace of /start_profile. A step ends with the copy of its tokens to the host. The gap between this copy and
the next activity of the GPU is time between steps. Gaps within a step are listed separately.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def idle(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Computes the gaps of a Chrome trace's `events`. Times are in us."""
    work = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in WORK
    )
    if not work:
        raise SystemExit("no GPU work in this trace")
    first, busy_until, name = work[0]
    begin, between, within, steps = first, 0.0, 0.0, 0
    for start, end, next_name in work[1:]:
        gap = start - busy_until
        step_ended = "DtoH" in name
        steps += step_ended
        if gap > 0:
            between, within = (between + gap, within) if step_ended else (between, within + gap)
        busy_until = max(busy_until, end)
        name = next_name
    total = busy_until - begin
    return {
        "steps": steps,
        "total_us": round(total),
        "between_steps": round(between / total, 4),
        "within_steps": round(within / total, 4),
    }


def main() -> None:
    args = parse_args()
    rows = []
    print(f"{'trace':30}  steps   total ms   idle between steps   within")
    for path in args.traces:
        row = idle(json.loads(path.read_text())["traceEvents"])
        rows.append({"trace": path.name} | row)
        print(
            f"{path.name:30} {row['steps']:6d} {row['total_us'] / 1e3:10.2f} "
            f"{row['between_steps']:20.2%} {row['within_steps']:8.2%}"
        )
    record("gpu_idle", {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
