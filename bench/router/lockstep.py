"""Measures what routing by cached prefixes is worth if the engines are ranks of one group, which step together.

    cargo build --release -p mla-router --bin mla-router -p mla-mock-worker --bins
    python bench/router/lockstep.py --out bench/results/lockstep.jsonl      # about 10 minutes

With DP attention the ranks share the experts, so each step takes as long as that of the slowest rank: one prompt delays the
tokens of all. The workloads are those of `shared_prefix.py`, with eight mock engines in lockstep and, for comparison, the
same engines by themselves. Busy share: the time that an engine needs for its own steps, of all time; in lockstep the rest
is waiting for slower ranks, or for requests.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from peers import ours
from record import record
from shared_prefix import QUICK, WORKLOADS, measure

COLUMNS = (
    "seconds",
    "tokens_per_s",
    "hit_share",
    "ttft_p50_s",
    "ttft_p99_s",
    "busy_share",
    "errors",
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--policies", nargs="*", default=QUICK)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, default=98304, help="cache of one rank")
    parser.add_argument("--prefill-rate", type=float, default=12_000, help="prompt tokens/s a rank")
    parser.add_argument("--decode-base-ms", type=float, default=20.0)
    parser.add_argument("--decode-per-request-ms", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


def settings(args: argparse.Namespace, lockstep: bool) -> argparse.Namespace:
    """Returns the settings of `measure`."""
    speed = ("prefill_rate", "decode_base_ms", "decode_per_request_ms")
    flags = [
        word for name in speed for word in (f"--{name.replace('_', '-')}", getattr(args, name))
    ]
    return argparse.Namespace(
        workers=args.workers,
        kv_tokens=args.kv_tokens,
        in_batch_sharing=True,
        engine_flags=[*flags, *(["--lockstep"] if lockstep else [])],
    )


def main() -> None:
    args = parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-") as name:
        for workload in args.workloads:
            requests = WORKLOADS[workload](random.Random(args.seed))
            lines = "\n".join(map(json.dumps, requests))
            print(f"\n{workload}: {len(requests)} conversations")
            print(f"  {'':<40}" + "".join(f"{column:>14}" for column in COLUMNS))
            for lockstep in (True, False):
                for policy in args.policies:
                    own = settings(args, lockstep)
                    row = measure(own, ours(policy), workload, lines, Path(name))
                    # The mock engines count it by their own steps
                    del row["load_spread"]
                    rows.append(row | {"lockstep": lockstep})
                    how = "in lockstep" if lockstep else "by themselves"
                    cells = "".join(f"{row[column]:>14}" for column in COLUMNS)
                    print(f"  {row['system'] + ', ' + how:<40}{cells}", flush=True)
    print()
    config = {key: value for key, value in vars(args).items() if key not in ("out", "workloads")}
    record("lockstep", {"config": config, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
