"""The cost of a router for each request: CPU time and added latency, in front of workers without cost.

    cargo build --release -p mla-router --bin mla-router -p mla-mock-worker --bins
    python bench/router/overhead.py            # about 8 minutes; --quick: 90 seconds

CPU is the user and system time of the router's processes, divided by the number of requests. Unlike the rate of
requests it does not depend on other load of the machine. The peers come from PyPI at pinned versions and run with
their defaults. All systems take turns within each case, and medians are printed. Floor: a proxy that only forwards
bytes makes 4 system calls a request (nginx makes 7).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers import (
    PEERS,
    RELEASE,
    System,
    cpu_seconds,
    free_port,
    nginx,
    ours,
    peer,
    running,
    until_ready,
)
from record import record

Case = dict[str, Any]


KINDS = {"hot": (), "cold": ("--cold",), "stream": ("--stream",)}  # flags of the client


def case(size: int, connections: int, kind: str = "hot") -> Case:
    return {"size": size, "connections": connections, "kind": kind}


QUICK = [
    case(2048, 32),
    case(16384, 32),
    case(2048, 1),
    case(2048, 32, "cold"),
    case(2048, 1, "stream"),
]
CASES = [
    case(200, 32),
    case(2048, 32),
    case(16384, 32),
    case(131072, 32),
    case(2048, 1),
    case(2048, 256),
    case(16384, 256),
    case(2048, 32, "cold"),
    case(16384, 32, "cold"),
    case(131072, 32, "cold"),
    case(2048, 1, "stream"),
    case(2048, 32, "stream"),
]


def parse_case(text: str) -> Case:
    """SIZE:CONNECTIONS or SIZE:CONNECTIONS:KIND. Raises ValueError for anything else."""
    size, connections, *kind = text.split(":")
    if kind not in ([], *([name] for name in KINDS)):
        raise ValueError(text)
    return case(int(size), int(connections), *kind)


def parse_build(text: str) -> tuple[str, Path]:
    """NAME=COMMAND. Raises ValueError for anything else."""
    name, binary = text.split("=")
    return name, Path(binary)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, one run of each")
    cases = "BYTES:CONNECTIONS or BYTES:CONNECTIONS:KIND, the kind hot, cold or stream"
    parser.add_argument("--cases", type=parse_case, nargs="*", metavar="CASE", help=cases)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--policy", default="cache_aware", help="of ours")
    parser.add_argument("--seconds", type=float, default=2, help="of each run")
    parser.add_argument("--runs", type=int, default=3, help="of each case; medians are printed")
    peers = (*PEERS, "nginx")
    parser.add_argument("--peers", nargs="*", default=peers, help="without any: ours alone")
    parser.add_argument(
        "--builds",
        type=parse_build,
        nargs="*",
        default=[],
        metavar="NAME=COMMAND",
        help="other builds of ours, to compare with: a binary, or mla-router of a virtual environment",
    )
    parser.add_argument("--peers-folder", type=Path, help="where they are, or will be, installed")
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


def load(port: int, pid: int, case: Case, seconds: float) -> dict[str, float]:
    """Runs once. Returns the CPU time of process group `pid` and the latencies of the clients, in microseconds."""
    words = [
        *(str(RELEASE / "load_client"), "hammer", f"127.0.0.1:{port}"),
        *("--connections", str(case["connections"]), "--size", str(case["size"])),
        *("--seconds", str(seconds)),
        *KINDS[case["kind"]],
    ]
    before = cpu_seconds(pid)
    felt = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
    cpu = cpu_seconds(pid) - before
    if felt["errors"]:
        raise RuntimeError(f"port {port}, {case}: {felt['errors']} errors, {felt['error']}")
    return {
        "cpu_us": cpu / felt["requests"] * 1e6,
        "p50_us": felt["latency"]["p50"] * 1e6,
        "p99_us": felt["latency"]["p99"] * 1e6,
        "ttft_us": felt["ttft"]["p50"] * 1e6,
        "rps": felt["requests"] / felt["seconds"],
    }


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]}


def measure(targets: dict[str, tuple[int, int]], case: Case, args: Any) -> list[dict[str, Any]]:
    """Runs all systems in turn, `args.runs` times."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
    for _ in range(args.runs):
        for name, (port, pid) in targets.items():
            runs[name].append(load(port, pid, case, args.seconds))
    direct = medians(runs["direct"])
    rows = []
    for name, its in runs.items():
        row = medians(its)
        added = {f"added_{at}": round(row[at] - direct[at], 1) for at in ("p50_us", "p99_us")}
        if case["kind"] == "stream":
            added["added_ttft_us"] = round(row["ttft_us"] - direct["ttft_us"], 1)
        rows.append({**case, "system": name, **row, **added})
    return rows


def print_case(case: Case, rows: list[dict[str, Any]]) -> None:
    shown = ("cpu_us", "p50_us", "p99_us", "added_p50_us", "added_p99_us", "added_ttft_us", "rps")
    print(f"\n{case['kind']}, {case['size']} B, {case['connections']} connections")
    print(f"  {'':<24}" + "".join(f"{name:>15}" for name in shown if name in rows[0]))
    for row in rows:
        cells = "".join(f"{row[name]:>15,.1f}" for name in shown if name in row)
        print(f"  {row['system']:<24}{cells}", flush=True)


def main() -> None:
    args = parse_args()
    if args.quick:
        args.runs = 1
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overhead-")))
        own = [ours(args.policy)]
        for name, binary in args.builds:
            own.append(replace(ours(args.policy, binary=binary), name=name))
        systems: list[System | None] = [*own]
        for name in args.peers:
            other = nginx(folder) if name == "nginx" else peer(name, args.peers_folder or folder)
            systems.append(other)
        first = free_port(args.workers)
        urls = [f"http://127.0.0.1:{first + i}" for i in range(args.workers)]
        mock = [RELEASE / "instant_worker", str(first), str(args.workers)]
        targets = {"direct": (first, stack.enter_context(running(mock)))}
        until_ready(first)
        for system in filter(None, systems):
            port = free_port()
            command = system.command(port, urls)
            pid = stack.enter_context(running(command, folder / f"{port}.log"))
            until_ready(port, urls if system in own else ())
            targets[system.name] = (port, pid)
        rows = []
        for case in args.cases or (QUICK if args.quick else CASES):
            rows += measure(targets, case, args)
            print_case(case, rows[-len(targets) :])
    print()
    config = {"workers": args.workers, "seconds": args.seconds, "runs": args.runs}
    record("router_overhead", {"policy": args.policy, **config, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
