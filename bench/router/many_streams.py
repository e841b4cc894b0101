"""Thousands of streams and active connections through one router: memory, added delay, lost events.

    cargo build --release -p mla-router --bin mla-router -p mla-mock-worker --bins
    python bench/router/many_streams.py        # about 3 minutes

The engines write numbered events with the time. The client checks that no event is missing and that each stream ends,
and measures the delay from the engine's write to its own read. Half of the connections have one stream after another,
the other half a short request every few seconds. The same load runs without a router; the difference is the router's
delay. Memory is the resident memory of the router: with all connections and no stream, with the streams, and some
seconds after their end.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import resource
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import RELEASE, cpu_seconds, free_port, ours, running, until_ready
from record import record

MIB = 1 << 20
SETTLE_S = 5.0  # time for the allocator to return free memory


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=5000, help="live at a time")
    parser.add_argument("--others", type=int, default=5000, help="connections with short requests")
    parser.add_argument("--pause", type=float, default=5, help="between these requests, in seconds")
    parser.add_argument("--events", type=int, default=20, help="of each stream")
    parser.add_argument("--interval-ms", type=int, default=500, help="from event to event")
    parser.add_argument("--ramp", type=float, default=10, help="seconds in which all connect")
    parser.add_argument("--seconds", type=float, default=20, help="of each run, after the ramp")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--policy", default="cache_aware")
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


def allow_files(wanted: int) -> None:
    """Raises the limit of open files, which child processes inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Only root may exceed the hard limit; for other users the error names the missing number.
    limits = max(soft, wanted), max(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextlib.contextmanager
def sampled(pid: int) -> Iterator[list[int]]:
    """Samples the resident memory of a process ten times a second within the block."""
    samples: list[int] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.1):
            samples.append(resident_bytes(pid))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def load(
    ports: list[int],
    *,
    streams: int,
    others: int,
    events: int,
    ramp: float,
    seconds: float,
    pause: float = 5,
) -> dict[str, Any]:
    """Runs the client once: live `streams`, and `others` with a request every `pause` seconds.

    All connect within `ramp` seconds. Raises RuntimeError if the client lost an event or a stream.
    """
    words = [
        *(str(RELEASE / "load_client"), "streams", *(f"127.0.0.1:{port}" for port in ports)),
        *("--live", str(streams), "--others", str(others), "--events", str(events)),
        *("--pause-s", str(pause), "--ramp-s", str(ramp), "--seconds", str(seconds)),
    ]
    felt: dict[str, Any] = json.loads(
        subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout
    )
    if felt["errors"]:
        raise RuntimeError(f"{felt['errors']} connections lost something: {felt['error']}")
    return felt


def in_ms(quantiles: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds * 1e3, 2) for name, seconds in quantiles.items()}


def main() -> None:
    args = parse_args()
    # Of the router: one for each client, and as many for workers at most.
    allow_files(2 * (args.streams + args.others))
    connections = args.streams + args.others
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streams-")))
        first = free_port(args.workers)
        ports = [first + i for i in range(args.workers)]
        pace = [str(args.events), str(args.interval_ms)]
        engines = [RELEASE / "paced_worker", str(first), str(args.workers), *pace]
        stack.enter_context(running(engines))
        until_ready(first)
        play = functools.partial(
            load, events=args.events, ramp=args.ramp, seconds=args.seconds, pause=args.pause
        )
        direct = play(ports, streams=args.streams, others=args.others)
        port = free_port()
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        command = ours(args.policy).command(port, urls)
        pid = stack.enter_context(running(command, folder / "router.log"))
        until_ready(port, urls)
        time.sleep(SETTLE_S)
        alone = resident_bytes(pid)
        with sampled(pid) as without_streams:
            play([port], streams=0, others=connections)
        before = cpu_seconds(pid)
        with sampled(pid) as with_streams:
            felt = play([port], streams=args.streams, others=args.others)
        cpu = cpu_seconds(pid) - before
        time.sleep(SETTLE_S)
        afterwards = resident_bytes(pid)
    result = {
        "events": felt["events"],
        "streams": felt["streams"],
        "requests": felt["requests"],
        "lost": felt["errors"],
        "event_delay_ms": {
            "direct": in_ms(direct["event_delay"]),
            "router": in_ms(felt["event_delay"]),
        },
        "latency_ms": {"direct": in_ms(direct["latency"]), "router": in_ms(felt["latency"])},
        "router_cpu_share": round(cpu / felt["seconds"], 3),
        "resident_mib": {
            "alone": round(alone / MIB, 1),
            "connections": round(max(without_streams) / MIB, 1),
            "streams": round(max(with_streams) / MIB, 1),
            "afterwards": round(afterwards / MIB, 1),
        },
        "bytes_a_connection": round((max(without_streams) - alone) / connections),
        "bytes_a_stream": round((max(with_streams) - max(without_streams)) / args.streams),
    }
    print(json.dumps(result, indent=2))
    config = {name: value for name, value in vars(args).items() if name != "out"}
    record("many_streams", {"config": config, **result}, args.out)


if __name__ == "__main__":
    main()
