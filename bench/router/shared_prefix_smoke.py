"""Measures whether requests with a common prefix reach the worker that has it cached.

The requests of a group share a long prefix and arrive shuffled. Both policies get the same requests in the same order,
with a new router and empty caches. One worker's cache holds only some of the prefixes, two together hold all of them. A cache-aware
router keeps each prefix on one worker; with another policy every worker evicts prefixes that it needs next.

In the ideal case each prefix is computed once:
(requests per group - 1) x prefix tokens, of every group.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launched import launched
from record import record

from mla_router import Router, RouterConfig

Policy = Literal["cache_aware", "round_robin"]
POLICIES: tuple[Policy, ...] = ("cache_aware", "round_robin")
VOCABULARY = 200  # every tokenizer has these ids


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--requests-per-group", type=int, default=16)
    parser.add_argument("--prefix-tokens", type=int, default=1024)
    parser.add_argument("--question-tokens", type=int, default=48)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--dp-size", type=int, default=2)
    parser.add_argument("--max-total-tokens", type=int, default=7168, help="cache of one worker")
    parser.add_argument("--model-path", default="", help="default: the model that is shipped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


def make_prompts(args: argparse.Namespace) -> list[list[int]]:
    rng = random.Random(args.seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    prefixes = [tokens(args.prefix_tokens) for _ in range(args.groups)]
    prompts = [
        prefix + tokens(args.question_tokens)
        for prefix in prefixes
        for _ in range(args.requests_per_group)
    ]
    rng.shuffle(prompts)
    return prompts


def flags_of(args: argparse.Namespace) -> list[str]:
    flags = {"--max-total-tokens": args.max_total_tokens, "--cpu-threads": 1}
    if args.model_path:
        flags["--model-path"] = args.model_path
    return [str(word) for pair in flags.items() for word in pair]


@contextlib.contextmanager
def new_router(workers: list[str], policy: Policy) -> Iterator[str]:
    """Starts a router with this policy in front of the workers, whose caches are emptied. Yields its URL."""
    for worker in workers:
        urllib.request.urlopen(
            urllib.request.Request(worker + "/flush_cache", method="POST")
        ).close()
    # On a busy machine a late worker is not down.
    config = RouterConfig(port=0, worker_urls=workers, policy=policy, health_check_timeout_secs=60)
    with Router(config) as router:
        while not all(worker["healthy"] for worker in router.workers()):
            time.sleep(0.05)
        yield router.url


@dataclass
class Tally:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0


async def measure(args: argparse.Namespace, url: str, prompts: list[list[int]]) -> Tally:
    tally = Tally()
    todo = iter(prompts)

    async def client(http: aiohttp.ClientSession, model: str) -> None:
        fixed = {"model": model, "max_tokens": args.output_tokens, "temperature": 0.0}
        for prompt in todo:
            body = fixed | {"prompt": prompt}
            async with http.post(url + "/v1/completions", json=body) as response:
                answer = await response.json()
                if response.status != 200:
                    raise RuntimeError(f"{response.status}: {answer}")
                tally.requests[response.headers["x-mla-worker"]] += 1
            usage = answer["usage"]
            tally.prompt_tokens += usage["prompt_tokens"]
            tally.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        async with http.get(url + "/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        start = time.monotonic()
        await asyncio.gather(*(client(http, model) for _ in range(args.concurrency)))
        tally.seconds = time.monotonic() - start
    return tally


def measured(args: argparse.Namespace, prompts: list[list[int]]) -> Iterator[tuple[Policy, Tally]]:
    with launched(flags_of(args), workers=args.dp_size) as url:
        with urllib.request.urlopen(url + "/workers") as answer:
            workers = [worker["url"] for worker in json.load(answer)["workers"]]
        for policy in POLICIES:
            with new_router(workers, policy) as router:
                yield policy, asyncio.run(measure(args, router, prompts))


def main() -> None:
    args = parse_args()
    prompts = make_prompts(args)
    ideal_tokens = args.groups * (args.requests_per_group - 1) * args.prefix_tokens
    ideal_share = ideal_tokens / sum(map(len, prompts))
    print(
        f"{args.groups} groups x {args.requests_per_group} requests, prefix {args.prefix_tokens} + "
        f"question {args.question_tokens} tokens, {args.dp_size} workers with room for "
        f"{args.max_total_tokens} tokens each; ideal cached share {ideal_share:.1%}\n"
    )
    print(f"{'policy':<14}{'cached share':>14}{'of ideal':>10}{'seconds':>9}   requests per worker")
    policies: dict[str, Any] = {}
    for policy, tally in measured(args, prompts):
        share = tally.cached_tokens / tally.prompt_tokens
        policies[policy] = {
            "prompt_tokens": tally.prompt_tokens,
            "cached_tokens": tally.cached_tokens,
            "cached_share": round(share, 4),
            "ratio_to_ideal": round(share / ideal_share, 4),
            "requests_per_worker": dict(sorted(tally.requests.items())),
            "seconds": round(tally.seconds, 2),
        }
        print(
            f"{policy:<14}{share:>14.1%}{share / ideal_share:>10.1%}{tally.seconds:>9.1f}   "
            + json.dumps(policies[policy]["requests_per_worker"])
        )
    print()
    config = {name: value for name, value in vars(args).items() if name != "out"}
    result = {"config": config, "ideal_share": round(ideal_share, 4), "policies": policies}
    record("shared_prefix_smoke", result, args.out)


if __name__ == "__main__":
    main()
