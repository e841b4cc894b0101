"""Compares the probabilities of tokens after different ways to fill the cache. They should be equal.

    python bench/accuracy/kl.py                                               # the small model, on the CPU
    python bench/accuracy/kl.py --model-path bench/shapes/deepseek-v2-lite --load-format dummy \\
      --device cuda --dtype bfloat16 --max-difference 0.5 --max-kl 0.01
    python bench/accuracy/kl.py --urls http://127.0.0.1:8000                  # servers that run already

Without `--urls` two workers are started, one after the other: one with the worker's flags, and one that computes
prompts in chunks of `--piece` tokens. A folder without a tokenizer uses the small model's tokenizer.

The first server continues prompts by sampling, one token a step. Then all servers, which have the same model, return the
logprobs of these tokens
- prefilled: prompt and answer in one request, with nothing cached;
- cached: the same again, with the longest cached prefix;
- in pieces: each request is longer by `--piece` tokens; the first one has nothing cached.
Cache salts separate these requests from each other and from earlier ones.

The tokens x are drawn from the distribution p that decoded them, at temperature 1. With
d = log q(x) - log p(x), the mean of exp(d) - 1 - d estimates KL(p || q) without bias and is never
negative (Schulman, 2020, http://joschu.net/blog/kl-approx.html). In float32 differences are around
1e-5; the exit status is 1 if any is above `--max-difference` or a KL above `--max-kl`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import secrets
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from run import questions

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
from record import record

from mla_router.worker import flags
from mla_router.worker.config import SMALL_MODEL, WorkerConfig
from support import processes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]  # of the answer's tokens in decode steps


@dataclass(frozen=True, slots=True)
class Scored:
    logprobs: list[float]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """The difference between one way to compute the logprobs and decode steps."""

    path: str
    max_difference: float
    mean_difference: float
    kl: float
    cached_tokens: int


Score = Callable[[aiohttp.ClientSession, Sample, str], Awaitable[Scored]]


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    async with http.post(path, json=body) as response:
        said = await response.json()
    if response.status != 200:
        raise SystemExit(f"{path} answered {response.status}: {said}")
    return said


async def sample(http: aiohttp.ClientSession, text: str, new_tokens: int, seed: int) -> Sample:
    prompt = (await post(http, "/tokenize", {"prompt": text}))["tokens"]
    body = {
        "input_ids": prompt,
        "sampling_params": {
            "max_new_tokens": new_tokens,
            "temperature": 1.0,
            "sampling_seed": seed,
            "ignore_eos": True,
        },
        "return_logprob": True,
    }
    scores = (await post(http, "/generate", body))["meta_info"]["output_token_logprobs"]
    return Sample(prompt, [token for _, token, _ in scores], [value for value, _, _ in scores])


async def score(http: aiohttp.ClientSession, tokens: list[int], start: int, salt: str) -> Scored:
    """Returns the logprobs of tokens[start:]. One more token is generated and dropped."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        # The first token of the list has no logprob.
        "logprob_start_len": start - 1,
        "cache_salt": salt,
    }
    meta = (await post(http, "/generate", body))["meta_info"]
    scores = meta["input_token_logprobs"][1:]
    if [token for _, token, _ in scores] != tokens[start:]:
        raise SystemExit(f"asked for the logprobs of {tokens[start:]}, was told {scores}")
    return Scored([value for value, _, _ in scores], meta["cached_tokens"])


async def whole(http: aiohttp.ClientSession, of: Sample, salt: str) -> Scored:
    return await score(http, of.prompt + of.answer, len(of.prompt), salt)


def in_pieces(size: int) -> Score:
    async def scored(http: aiohttp.ClientSession, of: Sample, salt: str) -> Scored:
        tokens, answer_begins = of.prompt + of.answer, len(of.prompt)
        logprobs: list[float] = []
        cached = 0
        for begin in range(0, len(tokens), size):
            end = min(begin + size, len(tokens))
            start = min(max(begin, answer_begins), end - 1)
            piece = await score(http, tokens[:end], start, salt)
            cached += piece.cached_tokens
            if end > answer_begins:
                logprobs += piece.logprobs
        return Scored(logprobs, cached)

    return scored


def compare(path: str, samples: list[Sample], scored: list[Scored]) -> Row:
    differences = [
        other - decoded
        for of, by_path in zip(samples, scored, strict=True)
        for decoded, other in zip(of.logprobs, by_path.logprobs, strict=True)
    ]
    count = len(differences)
    return Row(
        path,
        max_difference=max(map(abs, differences)),
        mean_difference=sum(map(abs, differences)) / count,
        kl=sum(math.expm1(d) - d for d in differences) / count,
        cached_tokens=sum(by_path.cached_tokens for by_path in scored),
    )


async def draw(url: str, prompts: list[str], *, new_tokens: int, api_key: str = "") -> list[Sample]:
    """Returns the continuation of each prompt by the server at `url`. Raises SystemExit if it refuses a request."""
    async with aiohttp.ClientSession(url, headers=authorization(api_key)) as http:
        return await asyncio.gather(
            *(sample(http, text, new_tokens, seed) for seed, text in enumerate(prompts))
        )


async def measure(
    url: str, samples: list[Sample], *, piece: int, name: str, api_key: str = ""
) -> list[Row]:
    """Returns one row for each way. Raises SystemExit if the server refuses a request."""
    # "cached" uses the cache of "prefilled".
    ways: list[tuple[str, str, Score]] = [
        ("prefilled", "whole", whole),
        ("cached", "whole", whole),
        (f"in pieces of {piece}", "pieces", in_pieces(piece)),
    ]
    run = secrets.token_hex(8)
    rows = []
    async with aiohttp.ClientSession(url, headers=authorization(api_key)) as http:
        for path, salt, way in ways:
            scored = await asyncio.gather(
                *(way(http, of, f"{run} {salt} {i}") for i, of in enumerate(samples))
            )
            rows.append(compare(f"{name} {path}", samples, scored))
    return rows


def authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


@contextmanager
def started(config: WorkerConfig, **changed: processes.Flag) -> Iterator[str]:
    """Starts a worker with the settings of `config`. Yields its URL."""
    flags: dict[str, processes.Flag] = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }
    with tempfile.TemporaryDirectory(prefix="mla-kl-") as scratch:
        folder = Path(scratch)
        for file in config.folder.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        if not (folder / TOKENIZER_FILES[0]).exists():
            for name in TOKENIZER_FILES:
                (folder / name).symlink_to(SMALL_MODEL / name)
        with processes.worker(**flags | {"model_path": folder} | changed) as worker:
            yield worker.url


def parse_args() -> tuple[argparse.Namespace, WorkerConfig]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--urls", nargs="+", help="servers; default: two workers are started")
    parser.add_argument("--api-key", help="of the servers")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-shots", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--piece", type=int, default=32, help="tokens, at least 2")
    parser.add_argument("--max-difference", type=float, default=1e-3, help="of a logprob")
    parser.add_argument("--max-kl", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    flags.add_flags(parser, leave_out=frozenset({"host", "port", "api_key"}))
    args = parser.parse_args()
    if args.piece < 2:
        parser.error(f"--piece {args.piece}: at least 2")
    return args, flags.from_namespace(args)


def main() -> int:
    args, config = parse_args()
    prompts = [q.prompt for q in questions(args.num_shots, args.num_prompts, args.seed)]
    new_tokens, key = args.new_tokens, config.api_key
    samples: list[Sample] = []
    rows: list[Row] = []

    def compare_with(url: str, name: str) -> None:
        if not samples:
            samples.extend(asyncio.run(draw(url, prompts, new_tokens=new_tokens, api_key=key)))
        rows.extend(asyncio.run(measure(url, samples, piece=args.piece, name=name, api_key=key)))

    for url in args.urls or []:
        compare_with(url, url)
    if not args.urls:
        with started(config) as url:
            compare_with(url, "as set,")
        with started(config, chunked_prefill_size=args.piece) as url:
            compare_with(url, f"chunks of {args.piece},")
    width = max(len(row.path) for row in rows)
    print(f"{'compared with decoding':{width}}  max |d|   mean |d|  KL        cached")
    for row in rows:
        print(
            f"{row.path:{width}}  {row.max_difference:.2e}  {row.mean_difference:.2e}  "
            f"{row.kl:.2e}  {row.cached_tokens}"
        )
    sizes = {"prompts": len(prompts), "new_tokens": args.new_tokens, "piece": args.piece}
    record("kl", {"config": sizes, "rows": [asdict(row) for row in rows]}, args.out)
    good = all(r.max_difference <= args.max_difference and r.kl <= args.max_kl for r in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
