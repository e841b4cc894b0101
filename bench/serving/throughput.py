"""Latency and throughput of a running server, at several concurrencies, by streaming `/generate`.

    python bench/serving/throughput.py --base-url http://127.0.0.1:30000

Random token ids, so that nothing is cached; every answer has exactly --output-tokens tokens. TTFT is
the time to the first token, TPOT the mean time of each further one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

VOCABULARY = 200  # every tokenizer has these ids


@dataclass(frozen=True)
class Timing:
    ttft_s: float
    tpot_s: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2, help="requests per connection")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="", help="what was measured, for the JSON line")
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


async def one(http: aiohttp.ClientSession, args: argparse.Namespace, rng: random.Random) -> Timing:
    body = {
        "input_ids": [rng.randrange(VOCABULARY) for _ in range(args.input_tokens)],
        "sampling_params": {
            "max_new_tokens": args.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        },
        "stream": True,
    }
    start = time.perf_counter()
    first = 0.0
    async with http.post(f"{args.base_url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        last = {}
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                last = json.loads(line[6:])
    end = time.perf_counter()
    made = last["meta_info"]["completion_tokens"]
    assert made == args.output_tokens, f"{made} tokens instead of {args.output_tokens}"
    return Timing(first - start, (end - first) / max(1, made - 1))


async def measure(args: argparse.Namespace, concurrency: int) -> dict[str, Any]:
    rng = random.Random(args.seed * 1000 + concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def client() -> list[Timing]:
            return [await one(http, args, rng) for _ in range(args.rounds)]

        await one(http, args, rng)  # warm-up
        start = time.perf_counter()
        per_client = await asyncio.gather(*(client() for _ in range(concurrency)))
        elapsed = time.perf_counter() - start
    timings = list(itertools.chain.from_iterable(per_client))
    return {
        "concurrency": concurrency,
        "requests": len(timings),
        "ttft_ms": round(statistics.median(t.ttft_s for t in timings) * 1e3, 2),
        "tpot_ms": round(statistics.median(t.tpot_s for t in timings) * 1e3, 3),
        "output_tokens_per_s": round(len(timings) * args.output_tokens / elapsed, 1),
        "total_tokens_per_s": round(
            len(timings) * (args.input_tokens + args.output_tokens) / elapsed, 1
        ),
    }


def main() -> None:
    args = parse_args()
    rows = [asyncio.run(measure(args, concurrency)) for concurrency in args.concurrency]
    print("  ".join(f"{name:>20}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>20}" for value in row.values()))
    lengths = {"input_tokens": args.input_tokens, "output_tokens": args.output_tokens}
    record("throughput", {"label": args.label, **lengths, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
