"""The behaviour of a router under more load than its workers can serve.

    cargo build --release -p mla-router --bin mla-router -p mla-mock-worker --bins
    python bench/router/overload.py               # about 15 minutes; --peers without any: ours alone
    python bench/router/overload_plot.py          # draws what has been kept in bench/results

Requests arrive at random times (Poisson), at a quarter of the capacity of two mock engines up to 16 times as much,
without waiting for answers; alone, and beside processes that only burn CPU. Goodput is the number of right answers a
second within `--patience` seconds. An engine takes 200 ms for an answer, runs four requests at a time and refuses more
than 16 waiting ones. A process with a higher priority (`prober.py`) requests `/health` and `/readiness` ten times a
second. Another one, with the router's priority, measures how long the kernel makes it wait for a core: no router can
answer sooner.

Retry-After is compared with the requests in the router's queue, divided by the goodput.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from peers import RELEASE, System, free_port, peer, running, until_ready
from record import record

WORKERS, PLACES, TOKENS, STEP_MS = 2, 4, 16, 12.5
CAPACITY = WORKERS * PLACES / (TOKENS * STEP_MS / 1e3)  # answers per second
QUEUE = 64  # of the router
LOADS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
PEERS = ("sglang-router==0.3.2", "smg==1.13.0")
PROBES = ("/health", "/readiness")
PROBER = Path(__file__).resolve().with_name("prober.py")


@dataclass
class Felt:
    """The results of the clients of one run."""

    latencies: list[float] = field(default_factory=list)
    last: float = 0.0  # time of the last right answer, in seconds from the start
    ends: Counter[str] = field(default_factory=Counter)
    advice: list[int] = field(default_factory=list)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loads", type=float, nargs="*", default=LOADS, help="times the capacity")
    parser.add_argument("--seconds", type=float, default=10, help="of each run")
    parser.add_argument("--patience", type=float, default=10, help="seconds a client waits")
    parser.add_argument("--burners", type=int, nargs="*", default=(0, 8), help="processes beside")
    parser.add_argument("--peers", nargs="*", default=PEERS, help="without any: ours alone")
    parser.add_argument("--peers-folder", type=Path, help="where they are, or will be, installed")
    parser.add_argument("--binaries", type=Path, default=RELEASE, help="folder of cargo's output")
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


def ours(binaries: Path) -> System:
    def command(port: int, workers: Sequence[str]) -> list[str]:
        flags = ["--port", str(port), "--queue-size", str(QUEUE), "--log-level", "error"]
        return [str(binaries / "mla-router"), *flags, "--worker-urls", *workers]

    return System("mla-router", command)


@contextlib.contextmanager
def engines(binaries: Path) -> Iterator[list[str]]:
    first = free_port(WORKERS)
    command = [
        *(binaries / "mla-mock-worker", "--listen", f"127.0.0.1:{first}", "--count", WORKERS),
        *("--max-running-requests", PLACES, "--max-queued-requests", 4 * PLACES),
        *("--decode-base-ms", STEP_MS, "--decode-per-request-ms", 0, "--prefill-rate", "inf"),
    ]
    with running([str(word) for word in command]):
        until_ready(first)
        yield [f"http://127.0.0.1:{first + i}" for i in range(WORKERS)]


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(running([sys.executable, "-c", "while True: pass"]))
        yield


async def ask(
    http: aiohttp.ClientSession, url: str, number: int, felt: Felt, started: float
) -> None:
    body = {"model": "mock", "prompt": f"{number} hello", "max_tokens": TOKENS}
    begun = time.monotonic()
    try:
        async with http.post(url + "/v1/completions", json=body) as response:
            await response.read()
            felt.ends[str(response.status)] += 1
            if response.status == 200:
                now = time.monotonic()
                felt.latencies.append(now - begun)
                felt.last = now - started
            elif response.status == 429 and "Retry-After" in response.headers:
                felt.advice.append(int(response.headers["Retry-After"]))
    except (aiohttp.ClientError, TimeoutError) as error:
        felt.ends[type(error).__name__] += 1


@contextlib.contextmanager
def probing(*words: str) -> Iterator[dict[str, Any]]:
    """Runs a prober within the block. Its results are complete afterwards."""
    found: dict[str, Any] = {}
    command = [sys.executable, str(PROBER), *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        yield found
        found.update(json.loads(process.communicate()[0]))


async def load(url: str, rate: float, seconds: float, patience: float) -> Felt:
    """Sends `rate` requests per second for `seconds`, and waits for their ends."""
    felt, rng = Felt(), random.Random(0)
    timeout = aiohttp.ClientTimeout(total=patience)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        begun, at, asked = time.monotonic(), 0.0, []
        while (at := at + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(begun + at - time.monotonic())
            asked.append(asyncio.create_task(ask(http, url, len(asked), felt, begun)))
        await asyncio.gather(*asked)
    return felt


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]


def row_of(
    felt: Felt, seconds: float, probes: dict[str, Any], idler: dict[str, Any]
) -> dict[str, Any]:
    # The queued requests are answered after the last one was sent.
    goodput = felt.ends["200"] / max(seconds, felt.last)
    row: dict[str, Any] = {"goodput": round(goodput, 2), "ends": dict(felt.ends)}
    if felt.latencies:
        row["p50_s"] = round(statistics.median(felt.latencies), 3)
        row["p99_s"] = round(p99(felt.latencies), 3)
    if felt.advice:
        row["retry_after_s"] = statistics.median(felt.advice)
        row["retry_after_due_s"] = round(QUEUE / max(goodput, 1e-9), 2)
    for path, times in probes["took_s"].items():
        row[path.strip("/") + "_p99_ms"] = round(p99(times) * 1e3, 1)
    row["prober_late_p99_ms"] = round(p99(probes["late_s"]) * 1e3, 1)
    row["core_wait_p99_ms"] = round(p99(idler["late_s"]) * 1e3, 1)
    row["prober_ahead"] = probes["ahead"]
    row["probe_statuses"] = {str(status): n for status, n in Counter(probes["statuses"]).items()}
    return row


def measure(args: argparse.Namespace, system: System, count: int, folder: Path) -> Iterator[Any]:
    """Returns one row for each load, with new engines and a new router for each."""
    for times in args.loads:
        port = free_port()
        with engines(args.binaries) as urls:
            log = folder / f"{port}.log"
            with running(system.command(port, urls), log):
                until_ready(port, path="/v1/chat/completions")
                with (
                    burners(count),
                    probing("127.0.0.1", str(port), *PROBES) as probes,
                    probing() as idler,
                ):
                    url, rate = f"http://127.0.0.1:{port}", times * CAPACITY
                    felt = asyncio.run(load(url, rate, args.seconds, args.patience))
        row = row_of(felt, args.seconds, probes, idler)
        yield {"system": system.name, "burners": count, "load": times, **row}


def main() -> None:
    args = parse_args()
    rows: list[dict[str, Any]] = []
    print(f"capacity {CAPACITY:g} answers a second, {os.cpu_count()} cores\n")
    print(
        f"{'system':<22}{'burners':>8}{'load':>7}{'goodput':>9}{'/health p99':>13}{'core p99':>11}  ends"
    )
    with tempfile.TemporaryDirectory(prefix="overload-") as name:
        folder = Path(name)
        systems = [ours(args.binaries)]
        systems += [peer(package, args.peers_folder or folder) for package in args.peers]
        for count in args.burners:
            for system in systems:
                for row in measure(args, system, count, folder):
                    rows.append(row)
                    print(
                        f"{row['system']:<22}{row['burners']:>8}{row['load']:>6g}x"
                        f"{row['goodput']:>9.1f}{row['health_p99_ms']:>10.1f} ms"
                        f"{row['core_wait_p99_ms']:>8.1f} ms  {row['ends']}",
                        flush=True,
                    )
    print()
    config = {
        "workers": WORKERS,
        "capacity": CAPACITY,
        "queue": QUEUE,
        "seconds": args.seconds,
        "patience": args.patience,
    }
    record("router_overload", {"config": config, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
