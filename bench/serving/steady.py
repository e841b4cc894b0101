"""Ten thousand mixed requests, 30% of them aborted, without a lost page, slot or descriptor.

    python bench/serving/steady.py            # --requests 1000 for a try

Starts a router and two workers with the shipped small model (or --model-path) and sends all kinds of requests. Then it
compares the workers' counts of memory, and the open files of all processes in /proc, with those before. Exits with 1
if a count has grown or a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadgen.mixture import Mixture

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
from record import record

from support import processes

CONCURRENCY = 48  # more than the workers can run, so that some requests wait
WARM_UP = 200  # requests before the first count: they open all lasting descriptors
SETTLE_TIMEOUT_S = 240.0  # of a busy machine
SETTLED_S = 2.0  # longer than idle connections stay open
# The router closes idle connections to workers soon, so open ones are in use.
FLAGS: dict[str, processes.Flag] = {
    "max_running_requests": 16,
    "max_queued_requests": CONCURRENCY,
    "router_upstream_idle_timeout_secs": 1,
}

Counters = dict[str, int]


@dataclass(frozen=True)
class Result:
    before: Counters
    after: Counters
    ends: Counter[str]
    kinds: Counter[str]

    @property
    def grown(self) -> list[str]:
        """Returns the counts that have grown."""
        return [name for name, value in self.after.items() if value > self.before.get(name, 0)]

    @property
    def failed(self) -> int:
        return sum(count for end, count in self.ends.items() if end.startswith("failed"))


def counters(server: processes.Running) -> Counters:
    """Returns the used resources after a flush of the caches."""
    found: Counters = {}
    for number, worker in enumerate(processes.workers(server.url)):
        processes.post_json(worker["url"] + "/flush_cache", {})
        state = processes.get_json(worker["url"] + "/get_server_info")["scheduler"]
        found |= {
            f"worker {number}: requests": state["running"] + state["waiting"],
            f"worker {number}: slots": state["total_slots"] - state["free_slots"],
            f"worker {number}: pages": state["total_pages"] - state["free_pages"],
            f"worker {number}: requests that the router counts": worker["requests"],
        }
    for pid in (server.pid, *(child.number for child in server.tree())):
        found[f"process {pid}: open files"] = len(os.listdir(f"/proc/{pid}/fd"))
    return found


def settled(server: processes.Running, done: Callable[[Counters], bool]) -> Counters:
    """Returns the counters when they are stable and `done`, or after some minutes."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    last, since = counters(server), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(0.25)
        now = counters(server)
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > SETTLED_S and done(now):
            break
    return last


def measure(server: processes.Running, requests: int, warm_up: int, seed: int) -> Result:
    model = processes.get_json(server.url + "/v1/models")["data"][0]["id"]

    async def send(count: int, seed: int) -> Mixture:
        mixture = Mixture(server.url, model, random.Random(seed))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            await mixture.run(http, count, CONCURRENCY)
        return mixture

    # On a busy machine the processes of the grammars may start last: this waits for them.
    for worker in processes.workers(server.url):
        sampling = {"max_new_tokens": 1, "regex": "a"}
        processes.post_json(worker["url"] + "/generate", {"text": "a", "sampling_params": sampling})
    asyncio.run(send(warm_up, seed + 1))
    before = settled(server, lambda _: True)
    mixture = asyncio.run(send(requests, seed))
    after = settled(
        server, lambda now: all(value <= before.get(name, 0) for name, value in now.items())
    )
    return Result(before, after, mixture.ends, mixture.kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model-path", type=Path, help="default: the small model that is shipped")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    args = parser.parse_args()
    print(f"seed {args.seed}")
    start = time.monotonic()
    with processes.server(dp_size=2, model_path=args.model_path, **FLAGS) as server:
        result = measure(server, args.requests, WARM_UP, args.seed)
    for name, count in (result.ends + result.kinds).most_common():
        print(f"{count:>8}  {name}")
    print(f"\n{'in use':<36}{'before':>8}{'after':>8}")
    for name, value in result.after.items():
        print(f"{name:<36}{result.before.get(name, 0):>8}{value:>8}")
    record(
        "steady",
        {
            "config": {"requests": args.requests, "seed": args.seed, "concurrency": CONCURRENCY},
            "duration_s": round(time.monotonic() - start, 1),
            "ends": dict(result.ends),
            "grown": result.grown,
            "open_files": [
                sum(value for name, value in found.items() if name.endswith("open files"))
                for found in (result.before, result.after)
            ],
        },
        args.out,
    )
    sys.exit(1 if result.grown or result.failed else 0)


if __name__ == "__main__":
    main()
