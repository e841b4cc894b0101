"""Ten minutes of random faults without a lost request.

    cargo build --release -p mla-router --bin mla-router -p mla-mock-worker --bins
    python bench/router/soak.py                # --minutes 1 for a try

A router, four mock engines, and clients with all kinds of requests; some leave, some read or upload slowly. Every few
seconds a healthy worker gets a fault: kill -9, SIGSTOP, a stopped engine, garbage, refusals, a broken, stopped or
malformed stream, a restart, removal. At most two workers are faulty at a time. Every 10 to 25 seconds 400 requests
come at once, several times what engines and queue can hold.

Every request must end exactly once and within its deadline. Its answer must equal that of a worker without faults,
byte for byte and with its counts, or be an error in `soak_traffic.ALLOWED`; beside a burst, also one in
`soak_traffic.OVERLOADED`. At the end no load may be reserved, no request may run, and the router's memory must not
have grown. Prints "lost 0", or exits with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from peers import RELEASE, free_port, running, until_ready
from soak_report import report
from soak_traffic import BODY_PAUSE_S, DEADLINE_S, LETTERS, Ends, Traffic

WORKERS = 4
UNWELL = 2  # at most
CLIENTS = 24
SYSTEMS = 16
RSS_PERIOD = 2.0
# Memory may grow while caches fill, but not in the second half of the run.
RSS_SLOPE = 1 << 20  # limit in bytes per minute
ENGINE = (
    *("--prefill-rate", "50000", "--decode-base-ms", "5", "--decode-per-request-ms", "0.2"),
    *("--kv-tokens", "16384", "--max-running-requests", "16", "--max-queued-requests", "8"),
)
# Deadlines short enough for a fault to be noticed within it.
ROUTER = (
    *("--first-token-timeout-secs", "2", "--inter-token-timeout-secs", "1"),
    *("--request-timeout-secs", str(DEADLINE_S), "--body-read-timeout-secs", str(BODY_PAUSE_S)),
    *("--queue-size", "64", "--queue-timeout-secs", "10"),
    *("--replay-key", "of-the-soak"),  # streams are continued only with a key
)

FAULTS: list[dict[str, Any]] = [
    {"kind": "kill"},
    {"kind": "stop"},
    {"kind": "remove"},
    {"kind": "restart_empty"},
    {"kind": "die", "after_tokens": 20},
    {"kind": "hang"},
    {"kind": "engine_stops"},
    {"kind": "slow", "factor": 20},
    {"kind": "freeze", "after_tokens": 10},
    # A stream is continued at most three times.
    *(
        {"kind": kind, "after_tokens": after, "count": 6}
        for kind in ("break", "bad_chunking", "engine_died")
        for after in (0, 10)
    ),
    {"kind": "no_done"},
    {"kind": "tokens_after_done"},
    *({"kind": "garbage", "form": form} for form in ("html", "empty")),
    *({"kind": "status", "status": status} for status in (429, 500, 502, 503)),
]
# A supervisor would restart a process that hangs.
RESTARTED = ("hang", "freeze")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn and printed")
    parser.add_argument("--binaries", type=Path, default=RELEASE, help="folder of the binaries")
    parser.add_argument("--faults", nargs="*", help="only these kinds")
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


@dataclass
class Engine:
    """A mock engine that is restarted after each death."""

    binary: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    unwell: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = [str(self.binary), "--listen", f"127.0.0.1:{self.port}", *ENGINE]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL)

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
            self.process = None


@dataclass
class Chaos:
    http: aiohttp.ClientSession
    router: str
    engines: list[Engine]
    rng: random.Random
    faults: list[dict[str, Any]]
    struck: Counter[str] = field(default_factory=Counter)
    healing: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(self.rng.uniform(0.5, 2.5))
            well = [engine for engine in self.engines if not engine.unwell]
            if len(self.engines) - len(well) < UNWELL:
                engine, fault = self.rng.choice(well), self.rng.choice(self.faults)
                engine.unwell = True
                task = asyncio.create_task(self.strike(engine, fault, self.rng.uniform(1, 6)))
                self.healing.add(task)
                task.add_done_callback(self.healing.discard)
        await asyncio.gather(*self.healing)

    async def strike(self, engine: Engine, fault: dict[str, Any], seconds: float) -> None:
        kind = fault["kind"]
        self.struck[" ".join(str(value) for value in fault.values())] += 1
        if kind == "kill":
            engine.end()
        elif kind == "stop":
            engine.signal(signal.SIGSTOP)
        elif kind == "remove":
            async with self.http.post(
                f"{self.router}/remove_worker", params={"url": engine.url}
            ) as answer:
                assert answer.status == 200, await answer.text()
        else:
            await self.tell(engine, fault)
        await asyncio.sleep(seconds)
        if kind == "stop":
            engine.signal(signal.SIGCONT)
        elif kind == "remove":
            async with self.http.post(
                f"{self.router}/add_worker", params={"url": engine.url}
            ) as answer:
                assert answer.status in (200, 201, 202), await answer.text()
        elif kind in RESTARTED:
            await self.tell(engine, {"kind": "restart_empty"})
        else:
            await self.tell(engine, {"kind": "none"})
        await self.until_in_rotation(engine)
        engine.unwell = False

    async def tell(self, engine: Engine, fault: dict[str, Any]) -> None:
        if engine.process is None or engine.process.poll() is not None:
            engine.end()
            engine.start()
            return
        # A worker that restarts closes the connection of the command.
        with contextlib.suppress(aiohttp.ClientError):
            async with self.http.post(engine.url + "/mock/fault", json=fault) as answer:
                assert answer.status == 200, await answer.text()

    async def until_in_rotation(self, engine: Engine) -> None:
        while True:
            async with self.http.get(self.router + "/workers") as answer:
                workers = (await answer.json())["workers"]
            for worker in workers:
                if worker["url"] == engine.url and worker["healthy"]:
                    return
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def stage(args: argparse.Namespace, folder: Path) -> AsyncIterator[tuple[Any, ...]]:
    """The processes: engines, one more engine without faults, and the router."""
    first = free_port(WORKERS + 1)
    engines = [Engine(args.binaries / "mla-mock-worker", first + i) for i in range(WORKERS)]
    fast = ["--prefill-rate", "inf", "--decode-base-ms", "0", "--decode-per-request-ms", "0"]
    reference = first + WORKERS
    port = free_port()
    router = [args.binaries / "mla-router", "--port", str(port), *ROUTER]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            engine.start()
            stack.callback(engine.end)
        stack.enter_context(
            running([engines[0].binary, "--listen", f"127.0.0.1:{reference}", *fast])
        )
        pid = stack.enter_context(
            running([*router, "--worker-urls", *(e.url for e in engines)], folder / "router.log")
        )
        until_ready(reference)
        until_ready(port, [engine.url for engine in engines])
        yield engines, f"http://127.0.0.1:{reference}", f"http://127.0.0.1:{port}", pid


async def sample_memory(pid: int, samples: list[tuple[float, int]]) -> None:
    while True:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        samples.append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))
        await asyncio.sleep(RSS_PERIOD)


def slope(samples: list[tuple[float, int]]) -> float:
    """Returns the slope over the second half in bytes per minute, by least squares."""
    half = samples[len(samples) // 2 :]
    times, sizes = zip(*half, strict=True)
    middle, mean = sum(times) / len(half), sum(sizes) / len(half)
    spread = sum((t - middle) ** 2 for t in times)
    return 60 * sum((t - middle) * (s - mean) for t, s in half) / spread if spread else 0.0


async def left_over(http: aiohttp.ClientSession, router: str, engines: list[Engine]) -> list[str]:
    """Returns the reserved load and the running requests, some seconds after the last request."""
    found: list[str] = []
    for _ in range(50):
        found = []
        async with http.get(router + "/workers") as answer:
            for worker in (await answer.json())["workers"]:
                for load in ("requests", "pending_tokens"):
                    if worker[load]:
                        found.append(f"{worker['url']}: {load} {worker[load]}")
        for engine in engines:
            async with http.get(engine.url + "/mock/stats") as answer:
                stats = await answer.json()
            if stats["running"] or stats["waiting"]:
                found.append(f"{engine.url} runs {stats['running']}, waiting {stats['waiting']}")
        if not found:
            return []
        await asyncio.sleep(0.1)
    return found


async def counted(http: aiohttp.ClientSession, router: str) -> int:
    """Returns the router's count of ended requests to workers."""
    async with http.get(router + "/metrics") as answer:
        page = await answer.text()
    name = "mla_router_request_seconds_count "
    return next(int(line.removeprefix(name)) for line in page.splitlines() if line.startswith(name))


async def soak(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng, ends = random.Random(args.seed), Ends()
    faults = [fault for fault in FAULTS if not args.faults or fault["kind"] in args.faults]
    samples: list[tuple[float, int]] = []
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        stage(args, folder) as (engines, reference, router, pid),
        aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
    ):
        before = await counted(http, router)
        memory = asyncio.create_task(sample_memory(pid, samples))
        systems = ["".join(rng.choices(LETTERS, k=1600)) for _ in range(SYSTEMS)]
        until = time.monotonic() + 60 * args.minutes
        chaos = Chaos(http, router, engines, rng, faults)
        clients = [
            Traffic(http, router, reference, random.Random(rng.random()), systems, ends)
            for _ in range(CLIENTS)
        ]
        await asyncio.gather(
            chaos.run(until),
            *(client.run(until) for client in clients),
            clients[0].uploads(until),
            clients[1].bursts(until),
        )
        memory.cancel()
        problems = [*ends.wrong, *await left_over(http, router, engines)]
        seen = await counted(http, router) - before
    ended = sum(ends.ended.values())
    if ended != ends.sent:
        problems.append(f"{ends.sent} requests sent, {ended} ended")
    # A client may have left before the router had its whole request.
    if not 0 <= ends.sent - seen <= ends.ended["left"]:
        problems.append(f"{ends.sent} requests sent, the router says {seen} have ended")
    growth = slope(samples)
    if growth > RSS_SLOPE and args.minutes >= 5:
        problems.append(f"memory grows by {growth / 1024:.0f} KiB a minute")
    return {
        "seed": args.seed,
        "minutes": args.minutes,
        "faults": dict(sorted(chaos.struck.items())),
        "bursts": ends.bursts,
        "sent": ends.sent,
        "ended": dict(ends.ended),
        "uploads": dict(ends.uploads),
        "counted_by_router": seen,
        "lost": ends.sent - ended + ends.ended["lost"],
        "slowest_s": round(ends.slowest, 2),
        "longest_pause_s": round(ends.longest_pause, 2),
        "rss_mib": round(samples[-1][1] / 2**20, 1),
        "rss_slope_kib_per_minute": round(growth / 1024, 1),
        "problems": problems,
    }


def main() -> int:
    args = parse_args()
    args.seed = random.randrange(1 << 32) if args.seed is None else args.seed
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        result = asyncio.run(soak(args, Path(folder)))
        if result["problems"]:
            sys.stdout.write((Path(folder) / "router.log").read_text()[-4000:])
    summary = (
        f"sent {result['sent']}, ended {sum(result['ended'].values())}, counted by the router "
        f"{result['counted_by_router']}, slowest {result['slowest_s']} s, longest pause "
        f"{result['longest_pause_s']} s, memory {result['rss_mib']} MiB, "
        f"{result['rss_slope_kib_per_minute']:+} KiB a minute\n"
        f"wrong {result['ended'].get('wrong', 0)}, lost {result['lost']}"
    )
    tables = ("faults", "ended", "uploads")
    return report("router_soak", result, args.out, tables=tables, summary=summary)


if __name__ == "__main__":
    sys.exit(main())
