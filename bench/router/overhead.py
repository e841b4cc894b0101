"""What the router costs a request: CPU time and added latency, in front of workers that cost nothing.

    cargo build --release -p mla-router --bin mla-router -p mla-mock-worker --bin instant_worker
    python bench/router/overhead.py            # needs wrk (Debian package of that name)

CPU is user and system time of the router's process, divided by requests: unlike requests a second
it does not depend on what else the machine does. The workers' own cost is measured the same way
without a router between. Floor: a proxy that only passes bytes on makes 4 system calls a request.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import ROOT, record

RELEASE = ROOT / "target" / "release"
LATENCY_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}
CASES: list[dict[str, Any]] = [
    {"size": 200, "connections": 32, "cold": False},
    {"size": 2048, "connections": 32, "cold": False},
    {"size": 16384, "connections": 32, "cold": False},
    {"size": 2048, "connections": 16, "cold": True},
    {"size": 2048, "connections": 1, "cold": False},
]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--policy", default="cache_aware")
    parser.add_argument("--seconds", type=int, default=4, help="of each run")
    parser.add_argument("--runs", type=int, default=3, help="of each case; medians are printed")
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


@contextlib.contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([str(word) for word in command], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until_open(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


def until_ready(port: int, workers: int) -> None:
    """All workers are in rotation."""
    while True:
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{port}/readiness"
            with urllib.request.urlopen(url) as answer:
                if f'"healthy_workers":{workers}'.encode() in answer.read():
                    return
        time.sleep(0.05)


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(port: int, case: dict[str, Any], seconds: int) -> tuple[int, float]:
    """Requests answered, and the median latency in microseconds."""
    environment = os.environ | {
        "SIZE": str(case["size"]),
        "COLD": str(int(case["cold"])),
        "PROMPTS": "64",
    }
    command = ["wrk", "-t1", f"-c{case['connections']}", f"-d{seconds}s", "--latency"]
    script = Path(__file__).with_suffix(".lua")
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    done = subprocess.run(
        [*command, "-s", str(script), url],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Non-2xx" not in done.stdout, done.stdout
    requests = re.search(r"(\d+) requests in", done.stdout)
    latency = re.search(r"50%\s+([\d.]+)(us|ms|s)", done.stdout)
    assert requests and latency, done.stdout
    return int(requests[1]), float(latency[1]) * LATENCY_UNITS[latency[2]]


def measure(
    port: int, process: subprocess.Popen[bytes], case: dict[str, Any], args: argparse.Namespace
) -> tuple[float, float]:
    """Medians over the runs: CPU microseconds a request, and median latency in microseconds."""
    cpus, latencies = [], []
    for _ in range(args.runs):
        before = cpu_seconds(process)
        requests, latency = load(port, case, args.seconds)
        cpus.append((cpu_seconds(process) - before) / requests * 1e6)
        latencies.append(latency)
    return statistics.median(cpus), statistics.median(latencies)


def main() -> None:
    args = parse_args()
    first, port = 41000, 40999
    urls = [f"http://127.0.0.1:{first + i}" for i in range(args.workers)]
    mock = [RELEASE / "instant_worker", str(first), str(args.workers)]
    router = [RELEASE / "mla-router", "--port", str(port), "--policy", args.policy]
    rows = []
    with running(*mock) as worker, running(*router, "--worker-urls", *urls) as proxy:
        until_open(first)
        until_ready(port, args.workers)
        for case in CASES:
            direct_cpu, direct_p50 = measure(first, worker, case, args)
            cpu, p50 = measure(port, proxy, case, args)
            rows.append(
                case
                | {
                    "router_cpu_us": round(cpu, 1),
                    "worker_cpu_us": round(direct_cpu, 1),
                    "p50_us": round(p50),
                    "direct_p50_us": round(direct_p50),
                }
            )
    print("  ".join(f"{name:>14}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>14}" for value in row.values()))
    record("router_overhead", {"policy": args.policy, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
