"""The router's CPU time for each event of many live streams, by the number of its threads.

    cargo build --release -p mla-router --bin mla-router -p mla-mock-worker --bins
    python bench/router/stream_cpu.py          # about 10 seconds a row

The engines write an event of each stream in each interval: all streams at the same times (`steps`, like an engine that
decodes them in one batch) or each at its own (`spread`). The router starts one thread for each core that it may use at
its start; afterwards it may use all cores, unless `--pinned` is given. `switches` counts how often its threads slept.
`--package` measures the router of the Python package, in which `launch_server` has it, instead of the binary.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from many_streams import allow_files, load
from peers import RELEASE, free_port, ours, running, until_ready
from record import record


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--pinned", action="store_true", help="as many cores as threads")
    parser.add_argument("--package", action="store_true", help="python -m mla_router.launch_router")
    parser.add_argument("--streams", type=int, default=1000, help="live at a time")
    parser.add_argument("--events", type=int, default=100, help="of each stream")
    parser.add_argument("--interval-ms", type=int, default=50, help="from event to event")
    parser.add_argument("--kinds", nargs="*", choices=("steps", "spread"), default=["steps"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


def set_cores(pid: int, cores: set[int]) -> None:
    """Lets all threads of a process run on these cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def counts(pid: int) -> dict[str, float]:
    """Returns what a process has used so far: user and system time in seconds, and voluntary context switches."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    switches = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        text = (task / "status").read_text()
        switches += int(text.partition("voluntary_ctxt_switches:")[2].split()[0])
    used = {"user": int(fields[11]) / tick, "system": int(fields[12]) / tick}
    return {**used, "switches": switches}


def measure(threads: int, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Starts engines and a router with this number of threads, and plays all streams once."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stream-cpu-")))
        first = free_port(args.workers)
        pace = [str(args.events), str(args.interval_ms), *(["steps"] if kind == "steps" else [])]
        engines = [RELEASE / "paced_worker", str(first), str(args.workers), *pace]
        stack.enter_context(running(engines))
        until_ready(first)
        port = free_port()
        urls = [f"http://127.0.0.1:{first + i}" for i in range(args.workers)]
        cores = os.sched_getaffinity(0)
        # The router inherits the cores of its parent.
        os.sched_setaffinity(0, set(sorted(cores)[:threads]))
        try:
            command = ours("cache_aware").command(port, urls)
            if args.package:
                command[:1] = [sys.executable, "-m", "mla_router.launch_router"]
            router = running(command, folder / "router.log")
            pid = stack.enter_context(router)
            until_ready(port, urls)
        finally:
            os.sched_setaffinity(0, cores)
        if not args.pinned:
            set_cores(pid, cores)
        before = counts(pid)
        # Each connection plays one stream: the time for further ones is short.
        played = load(
            [port], streams=args.streams, others=0, events=args.events, ramp=1, seconds=0.1
        )
        used = {name: value - before[name] for name, value in counts(pid).items()}
    events = played["events"]
    return {
        "threads": threads,
        "kind": kind,
        "events": events,
        "cpu_us": round((used["user"] + used["system"]) / events * 1e6, 1),
        "user_us": round(used["user"] / events * 1e6, 1),
        "system_us": round(used["system"] / events * 1e6, 1),
        "switches": round(used["switches"] / events, 3),
        "delay_p50_ms": round(played["event_delay"]["p50"] * 1e3, 2),
        "delay_p99_ms": round(played["event_delay"]["p99"] * 1e3, 2),
    }


def main() -> None:
    args = parse_args()
    allow_files(4 * args.streams + 1000)
    available = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    for kind in args.kinds:
        for threads in (count for count in args.threads if count <= available):
            rows.append(measure(threads, kind, args))
            if len(rows) == 1:
                print("".join(f"{name:>14}" for name in rows[0]))
            print("".join(f"{value:>14}" for value in rows[-1].values()), flush=True)
    config = {name: value for name, value in vars(args).items() if name not in ("out", "threads")}
    record("stream_cpu", {"config": config, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
