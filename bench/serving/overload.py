"""Goodput and latency of short requests beside many long ones, at multiples of the capacity.

    python bench/serving/overload.py            # --seconds 5 --loads 1,4 for a try
    python bench/serving/overload.py --max-queued-seconds 0 5       # without the workers' limit of time, and with it

Starts a router and workers with the shipped small model on the CPU. The capacity is the rate of some clients that send
one request after the other. Then requests arrive at random times, at multiples of this rate, without waiting for
answers. A 429 or 503 is a refusal. A complete answer within the deadline counts as goodput.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
from record import record

from support import processes

CLIENTS = 8  # of the measurement of the capacity
REFUSALS = (429, 503)
OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    prompt_tokens: int
    share: float  # of the requests


@dataclass(slots=True)
class Outcome:
    """The results of all requests of one kind at one load."""

    ends: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # latencies of the goodput

    def quantile(self, share: float) -> float | None:
        ordered = sorted(self.seconds)
        return (
            round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None
        )

    def summary(self, seconds: float) -> dict[str, Any]:
        return {
            "offered_per_s": round(self.ends.total() / seconds, 2),
            "good_per_s": round(len(self.seconds) / seconds, 2),
            "p50_s": self.quantile(0.5),
            "p90_s": self.quantile(0.9),
            "p99_s": self.quantile(0.99),
            "ends": dict(self.ends),
        }


class Load:
    """Makes requests of random tokens, without cached prefixes."""

    def __init__(
        self, url: str, model: str, kinds: Sequence[Kind], deadline_s: float, seed: int
    ) -> None:
        self._url, self._model, self._kinds = url, model, kinds
        self._deadline_s = deadline_s
        self._draw = random.Random(seed)
        self.outcomes: dict[str, Outcome] = defaultdict(Outcome)

    async def ask(self, http: aiohttp.ClientSession) -> None:
        (kind,) = self._draw.choices(self._kinds, [kind.share for kind in self._kinds])
        outcome = self.outcomes[kind.name]
        prompt = [self._draw.randrange(10, 1000) for _ in range(kind.prompt_tokens)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS}
        body |= {"ignore_eos": True}
        begin = time.monotonic()
        try:
            async with http.post(self._url + "/v1/completions", json=body) as response:
                answer = await response.json()
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            outcome.ends[type(error).__name__] += 1
            return
        if response.status in REFUSALS:
            outcome.ends[f"refused ({response.status})"] += 1
        elif response.status != 200 or answer["usage"]["completion_tokens"] != OUTPUT_TOKENS:
            outcome.ends[f"failed ({response.status})"] += 1
        else:
            outcome.ends["answered"] += 1
            outcome.seconds.append(time.monotonic() - begin)

    def session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self._deadline_s)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def closed(self, clients: int, seconds: float) -> float:
        """Measures the answers per second of clients that send one request after the other."""
        begin = time.monotonic()

        async def client(http: aiohttp.ClientSession) -> None:
            while time.monotonic() - begin < seconds:
                await self.ask(http)

        async with self.session() as http:
            await asyncio.gather(*(client(http) for _ in range(clients)))
        answered = sum(len(outcome.seconds) for outcome in self.outcomes.values())
        return answered / (time.monotonic() - begin)

    async def open(self, rate: float, seconds: float) -> float:
        """Sends requests at `rate`. Returns the seconds until the last one has ended."""
        begin = due = time.monotonic()
        async with self.session() as http, asyncio.TaskGroup() as tasks:
            while (due := due + self._draw.expovariate(rate)) < begin + seconds:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.create_task(self.ask(http))
        return time.monotonic() - begin


def measure(
    url: str, max_queued_seconds: float, capacity: float | None, args: argparse.Namespace
) -> tuple[float, list[dict[str, Any]]]:
    """The capacity, measured where it is not given, and a row for each load and kind."""
    model = processes.get_json(url + "/v1/models")["data"][0]["id"]
    kinds = [
        Kind("short", args.short_tokens, 1 - args.long_share),
        Kind("long", args.long_tokens, args.long_share),
    ]

    def load(seed: int) -> Load:
        return Load(url, model, kinds, args.deadline, args.seed + seed)

    capacity = capacity or asyncio.run(load(0).closed(CLIENTS, args.seconds))
    print(f"capacity {capacity:.2f} answers a second, --max-queued-seconds {max_queued_seconds:g}")
    print(
        f"{'load':>5} {'kind':<6}{'offered/s':>10}{'good/s':>8}{'p50 s':>8}{'p90 s':>8}{'p99 s':>8}  ends"
    )
    rows = []
    for times in args.loads:
        at = load(times)
        seconds = asyncio.run(at.open(times * capacity, args.seconds))
        for kind in kinds:
            row = at.outcomes[kind.name].summary(seconds)
            setting = {"max_queued_seconds": max_queued_seconds}
            rows.append({**setting, "load": times, "kind": kind.name, **row})
            quantiles = "".join(
                f"{row[name] or float('nan'):>8.2f}" for name in ("p50_s", "p90_s", "p99_s")
            )
            print(
                f"{times:>4}x {kind.name:<6}{row['offered_per_s']:>10.2f}{row['good_per_s']:>8.2f}"
                f"{quantiles}  {row['ends']}",
                flush=True,
            )
    return capacity, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each load")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds of a request")
    parser.add_argument(
        "--loads",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[1, 4, 16],
        help="multiples of the capacity",
    )
    parser.add_argument("--short-tokens", type=int, default=30)
    parser.add_argument("--long-tokens", type=int, default=6000)
    parser.add_argument("--long-share", type=float, default=0.2, help="of the requests")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--max-queued-seconds",
        type=float,
        nargs="*",
        default=[0.0],
        help="of the workers; several: one after the other, at the capacity of the first",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    args = parser.parse_args()
    capacity: float | None = None
    rows: list[dict[str, Any]] = []
    for limit in args.max_queued_seconds:
        with processes.server(dp_size=args.workers, max_queued_seconds=limit) as server:
            capacity, found = measure(server.url, limit, capacity, args)
        rows += found
    config = {name: value for name, value in vars(args).items() if name != "out"}
    capacity_per_s = round(capacity or 0.0, 2)
    record(
        "serving_overload",
        {"config": config, "capacity_per_s": capacity_per_s, "loads": rows},
        args.out,
    )


if __name__ == "__main__":
    main()
