"""Compares every token of answers with and without speculative decoding, over HTTP and through the router.

    python bench/accuracy/speculation_equality.py                      # 1,319 word problems, 200 random requests
    python bench/accuracy/speculation_equality.py --model-path LLAMA --eagle HEAD --topk 1 4

For each setting it starts a server, sends word problems (`run.py`) and random requests of every kind (`random_requests.py`)
at once, and compares their answers with those of the first server, which has no drafts: token ids, texts, tool calls, ends
and counts. `--kill` adds a router in front of two workers, on the same GPU if there is one. One of them is killed by SIGKILL
in the middle; its requests continue on the other one. `--at-once` serves several settings beside each other. The exit status
is 1 if an answer differs in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from random_requests import Answer, Request, ask, random_requests, word_problems
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
from launched import launched
from record import record

from mla_router.worker.config import SMALL_MODEL
from support import processes
from support.processes import get_json, workers
from support.procfs import listener

Flags = dict[str, str | int | bool]


@dataclass(frozen=True)
class Setting:
    name: str
    flags: Flags = field(default_factory=dict)
    killed: bool = False


@dataclass
class Result:
    answers: list[Answer]
    drafts: int = 0  # verified, of workers that live
    accepted: int = 0
    continued: int = 0  # requests that another worker went on with


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-path", type=Path, default=SMALL_MODEL)
    parser.add_argument("--eagle", type=Path, help="a draft head: EAGLE in place of NEXTN")
    parser.add_argument("--drafts", type=int, nargs="*", default=[1, 2, 3], help="of a chain")
    parser.add_argument("--topk", type=int, nargs="*", default=[1], help="with --eagle")
    parser.add_argument("--overlap", choices=["on", "off"], nargs="+", default=["on", "off"])
    parser.add_argument("--kill", action="store_true", help="once more, with a killed worker")
    parser.add_argument("--num-questions", type=int, default=1319)
    parser.add_argument("--num-shots", type=int, default=8)
    parser.add_argument("--num-random", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=1, help="settings beside each other")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to append a JSON line a setting to")
    return parser.parse_args()


def settings(args: argparse.Namespace) -> list[Setting]:
    """Returns the settings, first that without drafts."""
    found = [Setting("no drafts")]
    chains: list[tuple[str, Flags]] = []
    if args.eagle is None:
        for drafts in args.drafts:
            flags: Flags = {"speculative-algorithm": "NEXTN", "speculative-num-steps": drafts}
            chains.append((f"NEXTN k={drafts}", flags))
    for topk in args.topk if args.eagle else ():
        for drafts in args.drafts:
            head: Flags = {
                "speculative-algorithm": "EAGLE",
                "speculative-draft-model-path": str(args.eagle),
                "speculative-num-steps": drafts,
            }
            if topk > 1:
                rows = min(8 * drafts, 1 + topk * drafts)
                head |= {"speculative-eagle-topk": topk, "speculative-num-draft-tokens": rows}
            chains.append((f"EAGLE k={drafts} topk={topk}", head))
    for overlap in args.overlap:
        off: Flags = {} if overlap == "on" else {"disable-overlap-schedule": True}
        if off:
            found.append(Setting("no drafts, no overlap", off))
        suffix = ", no overlap" if off else ""
        found += [Setting(name + suffix, flags | off) for name, flags in chains]
    if args.kill and chains:
        found += [Setting(f"{name}, kill -9", flags, killed=True) for name, flags in chains[-1:]]
    return found


def worker_flags(args: argparse.Namespace, setting: Setting) -> Flags:
    common: Flags = {
        "model-path": str(args.model_path),
        "served-model-name": "mla-small",
        "device": args.device,
        "dtype": args.dtype,
        "max-total-tokens": 131072,
        "max-running-requests": args.parallel,
        "context-length": 4096,
    }
    if args.device == "cpu":
        common["cpu-threads"] = 1
    else:
        common["cuda-graph-max-bs"] = args.parallel
        common["piecewise-cuda-graph-max-tokens"] = 512
    return common | setting.flags


@contextlib.contextmanager
def served(args: argparse.Namespace, setting: Setting) -> Iterator[tuple[str, list[str]]]:
    """Starts a server; yields its URL and those of its workers."""
    flags = worker_flags(args, setting)
    if not setting.killed:
        argv = [
            f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()
        ]
        with launched(argv, workers=1) as url:
            yield url, [entry["url"] for entry in workers(url)]
        return
    own = {name.replace("-", "_"): value for name, value in flags.items() if name != "model-path"}
    starts = [processes.worker(args.model_path, **own) for _ in range(2)]
    with processes.together(*starts) as running:
        urls = [worker.url for worker in running]
        with processes.router(urls) as router:
            processes.wait_until(
                lambda: len(processes.healthy_workers(router.url)) == 2, "two workers"
            )
            yield router.url, urls


def serve_all(
    args: argparse.Namespace, chosen: list[Setting], asked: list[Request]
) -> Iterator[tuple[Setting, Result]]:
    """Yields each setting with its result."""
    serve_one = partial(serve, args, asked)
    if args.at_once == 1:
        yield from zip(chosen, map(serve_one, chosen), strict=True)
        return
    # Each process has clients of its own, and ports (`support/processes.py`)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.at_once, spawned) as pool:
        results: Iterable[Result] = pool.map(serve_one, chosen)
        yield from zip(chosen, results, strict=True)


def serve(args: argparse.Namespace, asked: list[Request], setting: Setting) -> Result:
    processes.EVENT_TIMEOUT_S = 600.0  # a GPU's first start compiles kernels
    with served(args, setting) as (url, urls):
        victim, *others = urls if setting.killed else [None, *urls]
        result = Result(asyncio.run(ask_all(url, asked, args.parallel, victim)))
        for worker in others:
            (state,) = get_json(f"{worker}/get_server_info")["internal_states"]
            result.drafts += state["draft_tokens"]
            result.accepted += state["accepted_tokens"]
        with urllib.request.urlopen(f"{url}/metrics") as response:
            page = response.read().decode()
        found = re.findall(r'mla_router_replays_total\{outcome="continued"\} (\d+)', page)
        result.continued = sum(map(int, found))
        return result


async def ask_all(
    url: str, asked: list[Request], parallel: int, victim: str | None
) -> list[Answer]:
    """Returns the answers in the order of `asked`. Kills the worker `victim` after half of them, in the middle of others."""
    places = asyncio.Semaphore(parallel)
    timeout = aiohttp.ClientTimeout(total=None)
    left = len(asked) // 2
    async with aiohttp.ClientSession(url, timeout=timeout) as http:
        with tqdm(total=len(asked), desc="Asking", disable=None) as progress:

            async def one(request: Request) -> Answer:
                nonlocal left
                async with places:
                    found = await ask(http, request)
                progress.update()
                left -= 1
                if victim is not None and left == 0:
                    os.kill(listener(int(victim.rpartition(":")[2])), signal.SIGKILL)
                return found

            return await asyncio.gather(*map(one, asked))


def compare(asked: list[Request], first: list[Answer], other: list[Answer]) -> dict[str, Any]:
    """Returns how many answers of each kind differ, and the first that does."""
    counts = Counter(request.kind for request in asked)
    pairs = zip(asked, first, other, strict=True)
    differing = [(request.kind, a, b) for request, a, b in pairs if a != b]
    by_kind = Counter(kind for kind, _, _ in differing)
    result: dict[str, Any] = {
        "requests": dict(counts),
        "differ": len(differing),
        "equal_share": round(1 - len(differing) / len(asked), 4),
        "differ_by_kind": dict(by_kind),
        "tokens": sum(answer.completion_tokens for answer in other),
    }
    if differing:
        kind, a, b = differing[0]
        result["first_difference"] = [kind, dict(a.texts), dict(b.texts)]
    return result


def main() -> int:
    args = parse_args()
    asked = word_problems(args.num_shots, args.num_questions, args.seed)
    draw = random_requests(args.num_random, args.seed)
    # Random requests among the problems, so that each batch has several kinds
    every = max(1, len(asked) // max(1, len(draw)))
    for at, request in enumerate(draw):
        asked.insert(min(len(asked), at * (every + 1)), request)
    first: list[Answer] = []
    differing = 0
    for setting, result in serve_all(args, settings(args), asked):
        first = first or result.answers
        compared = compare(asked, first, result.answers)
        differing += compared["differ"]
        accepted = result.accepted / max(1, result.drafts)
        print(
            f"{setting.name:32} {compared['differ']} of {len(asked)} answers differ, {compared['tokens']} tokens, "
            f"{accepted:.0%} of {result.drafts} drafts accepted, {result.continued} requests continued",
            flush=True,
        )
        config = {"setting": setting.name, "device": args.device, "dtype": args.dtype}
        config |= {"flags": setting.flags, "parallel": args.parallel}
        drafts = {"drafts": result.drafts, "accepted": result.accepted}
        counts = drafts | ({"continued": result.continued} if setting.killed else {})
        record("speculation_equality", {"config": config, **compared, **counts}, args.out)
    return 1 if differing and args.dtype == "float32" else 0


if __name__ == "__main__":
    sys.exit(main())
