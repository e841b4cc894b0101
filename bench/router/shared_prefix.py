"""Measures whether requests with a common prefix reach the engine that has it cached, and whether the load stays even.

    cargo build --release -p mla-router --bin mla-router -p mla-mock-worker --bins
    python bench/router/shared_prefix.py       # about 25 minutes; --quick: ours and round robin

Eight mock engines have the speed of Llama 3.1 8B on an A100 (see `mla-mock-worker --help`). No engine's cache can hold
all prefixes. Every system gets the same requests, with new engines. Hit share: the share of prompt tokens from the
cache. Load: running and waiting requests of an engine over time; spread is the load of the busiest engine over the
mean.

* groups: SGLang's generated-shared-prefix: 64 groups of 16, system prompt 2048 tokens, question 128,
  output 256, shuffled, all sent at once. Best possible hit share: 88.2%.
* turns: chats of 4 turns with 8 system prompts; the prompt of each turn contains all earlier turns.
* zipf: system prompts drawn by Zipf's law, arriving at a steady rate.
* unrelated: 2,000 prompts of 256 tokens without a common prefix, output 32, sent at once. No policy can do better than
  an even load, so this shows the price of looking for prefixes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peers import PEERS, RELEASE, System, cpu_seconds, free_port, ours, peer, running, until_ready
from record import record

TOKEN_BYTES = 4  # of the mock engines
LETTERS = "abcdefghijklmnopqrstuvwxyz"
POLICIES = (
    "round_robin",
    "random",
    "power_of_two",
    "least_load",
    "prefix_hash",
    "cache_aware_threshold",
    "cache_aware",
)
QUICK = ("round_robin", "cache_aware")
Conversation = dict[str, Any]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--peers", nargs="*", default=PEERS)
    parser.add_argument("--peers-folder", type=Path, help="where they are, or will be, installed")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, default=98304, help="cache of one worker")
    parser.add_argument(
        "--in-batch-sharing",
        action="store_true",
        help="an engine computes a prefix once that several of its requests need now, as ours does",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    parser.set_defaults(engine_flags=())  # more flags of the mock engines (`lockstep.py`)
    return parser.parse_args()


def text(rng: random.Random, tokens: int) -> str:
    return "".join(rng.choices(LETTERS, k=tokens * TOKEN_BYTES))


def groups(rng: random.Random) -> list[Conversation]:
    requests = []
    for _ in range(64):
        system = text(rng, 2048)
        requests += [
            {"system": system, "turns": [text(rng, 128)], "max_tokens": 256} for _ in range(16)
        ]
    rng.shuffle(requests)
    return requests


def turns(rng: random.Random) -> list[Conversation]:
    systems = [text(rng, 512) for _ in range(8)]
    return [
        {
            "system": rng.choice(systems),
            "turns": [text(rng, 256) for _ in range(4)],
            "max_tokens": 128,
        }
        for _ in range(384)
    ]


def zipf(rng: random.Random) -> list[Conversation]:
    systems = [text(rng, 2048) for _ in range(256)]
    weights = [1 / rank for rank in range(1, len(systems) + 1)]
    at, requests = 0.0, []
    for system in rng.choices(systems, weights, k=1500):
        at += rng.expovariate(60)
        requests.append({"at": at, "system": system, "turns": [text(rng, 128)], "max_tokens": 128})
    return requests


def unrelated(rng: random.Random) -> list[Conversation]:
    return [{"system": "", "turns": [text(rng, 256)], "max_tokens": 32} for _ in range(2000)]


WORKLOADS: dict[str, Callable[[random.Random], list[Conversation]]] = {
    "groups": groups,
    "turns": turns,
    "zipf": zipf,
    "unrelated": unrelated,
}
# Conversations at a time. All of the first workload are sent at once, as in SGLang's original.
CONCURRENCY = {"groups": 1024, "turns": 128, "zipf": 1024, "unrelated": 2000}


@contextlib.contextmanager
def engines(args: argparse.Namespace) -> Iterator[tuple[list[str], int]]:
    first = free_port(args.workers)
    command = [
        *(RELEASE / "mla-mock-worker", "--listen", f"127.0.0.1:{first}", "--count", args.workers),
        # As many requests run as fit into the KV cache, as in SGLang.
        *("--kv-tokens", args.kv_tokens, "--max-running-requests", 256, "--stream-interval", 8),
        *(["--in-batch-sharing"] if args.in_batch_sharing else []),
        *args.engine_flags,
    ]
    with running(command) as pid:
        for worker in range(args.workers):
            until_ready(first + worker)
        yield [f"http://127.0.0.1:{first + worker}" for worker in range(args.workers)], pid


def stats(urls: list[str]) -> list[dict[str, float]]:
    answers = []
    for url in urls:
        with urllib.request.urlopen(url + "/mock/stats") as answer:
            answers.append(json.load(answer))
    return answers


def spread(values: list[float]) -> float:
    return round(max(values) * len(values) / (sum(values) or 1), 2)


def measure(
    args: argparse.Namespace, system: System, workload: str, requests: str, folder: Path
) -> dict[str, Any]:
    port = free_port()
    with engines(args) as (urls, engine_pid):
        log = folder / f"{port}.log"
        with running(system.command(port, urls), log) as router_pid:
            until_ready(port, urls)
            for url in urls:
                urllib.request.urlopen(url + "/flush_cache", data=b"").close()
            before, busy = stats(urls), [cpu_seconds(pid) for pid in (router_pid, engine_pid)]
            begun = time.monotonic()
            client = subprocess.run(
                [
                    *(RELEASE / "load_client", "converse", f"127.0.0.1:{port}"),
                    *("--concurrency", str(CONCURRENCY[workload])),
                ],
                input=requests.encode(),
                check=True,
                stdout=subprocess.PIPE,
            )
            seconds = time.monotonic() - begun
            spent = [cpu_seconds(pid) for pid in (router_pid, engine_pid)]
            after = stats(urls)
    felt = json.loads(client.stdout)
    if felt["errors"]:
        print(f"  {system.name}: {felt['errors']} errors, {felt['error']}")
    each = [
        {name: its[name] - old[name] for name in its}
        for its, old in zip(after, before, strict=True)
    ]
    total = {name: sum(its[name] for its in each) for name in each[0]}
    tokens = felt["prompt_tokens"] + felt["completion_tokens"]
    return {
        "workload": workload,
        "system": system.name,
        "seconds": round(felt["seconds"], 2),
        "tokens_per_s": round(tokens / felt["seconds"]),
        "hit_share": round(total["cached_tokens"] / total["prompt_tokens"], 4),
        "ttft_p50_s": round(felt["ttft"]["p50"], 3),
        "ttft_p99_s": round(felt["ttft"]["p99"], 3),
        "load_spread": spread([its["request_seconds"] for its in each]),
        "busy_share": round(total["busy_seconds"] / len(urls) / seconds, 3),
        "requests_spread": spread([its["requests"] for its in each]),
        "errors": felt["errors"],
        "router_cpu": round((spent[0] - busy[0]) / seconds, 2),
        "engines_cpu": round((spent[1] - busy[1]) / seconds, 2),
    }


def main() -> None:
    args = parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shared-prefix-") as name:
        folder = Path(name)
        systems = [ours(policy) for policy in (QUICK if args.quick else args.policies)]
        if not args.quick:
            systems += [peer(package, args.peers_folder or folder) for package in args.peers]
        for workload in args.workloads:
            requests = WORKLOADS[workload](random.Random(args.seed))
            lines = "\n".join(map(json.dumps, requests))
            print(f"\n{workload}: {len(requests)} conversations")
            for system in systems:
                rows.append(measure(args, system, workload, lines, folder))
                if system is systems[0]:
                    shown = [name for name in rows[-1] if name not in ("workload", "system")]
                    print(f"  {'':<32}" + "".join(f"{name:>16}" for name in shown))
                cells = "".join(f"{rows[-1][name]:>16}" for name in shown)
                print(f"  {system.name:<32}{cells}", flush=True)
    print()
    config = {"workers": args.workers, "kv_tokens": args.kv_tokens, "seed": args.seed}
    config["in_batch_sharing"] = args.in_batch_sharing
    record("shared_prefix", {"config": config, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
