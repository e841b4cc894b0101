"""Does a token's probability depend on how its context got into the cache? It should not.

    python -m mla_router.launch_worker --port 8000                            # in another terminal
    python bench/accuracy/kl.py --urls http://127.0.0.1:8000

The first of `--urls` continues prompts by sampling, a step a token. Then each of them, all servers of
the same model, says how probable it finds the same tokens
- prefilled: prompt and answer in one request, with nothing cached;
- cached: the same again, with as much of it cached as can be;
- in pieces: longer by `--piece` tokens with each request, the first with nothing cached.
Salts keep these apart from each other and from all that a server has cached before.

Other settings are other servers: `--chunked-prefill-size`, `--page-size`, `--dtype`.

The tokens x are drawn from the distribution p that decoded them, at temperature 1. With
d = log q(x) - log p(x), the mean of exp(d) - 1 - d estimates KL(p || q) without bias and is never
negative (Schulman, 2020, http://joschu.net/blog/kl-approx.html). In float32 differences are around
1e-5; the exit status is 1 if any is above `--max-difference` or a KL above `--max-kl`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from run import questions

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from record import record


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]  # of the answer's tokens, as they were decoded


@dataclass(frozen=True, slots=True)
class Scored:
    logprobs: list[float]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """How one way of computing the tokens' logprobs differs from decoding them."""

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
    """Logprobs of tokens[start:], each after those before it. One more is generated and dropped."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        # The first that is told of has no logprob.
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


async def measure(
    urls: list[str], *, prompts: list[str], new_tokens: int, piece: int, api_key: str = ""
) -> list[Row]:
    """A row for each of the `urls` and each way. Raises SystemExit if a server refuses a request."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(urls[0], headers=headers) as http:
        samples = await asyncio.gather(
            *(sample(http, text, new_tokens, seed) for seed, text in enumerate(prompts))
        )
    rows = []
    # "cached" finds what "prefilled" left behind.
    ways: list[tuple[str, str, Score]] = [
        ("prefilled", "whole", whole),
        ("cached", "whole", whole),
        (f"in pieces of {piece}", "pieces", in_pieces(piece)),
    ]
    run = secrets.token_hex(8)
    for url in urls:
        async with aiohttp.ClientSession(url, headers=headers) as http:
            for name, salt, way in ways:
                scored = await asyncio.gather(
                    *(way(http, of, f"{run} {salt} {i}") for i, of in enumerate(samples))
                )
                rows.append(compare(f"{url} {name}", samples, scored))
    return rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--urls", nargs="+", default=["http://127.0.0.1:8000"])
    parser.add_argument("--api-key", default="")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-shots", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--piece", type=int, default=32, help="tokens, at least 2")
    parser.add_argument("--max-difference", type=float, default=1e-3, help="of a logprob")
    parser.add_argument("--max-kl", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    args = parser.parse_args()
    if args.piece < 2:
        parser.error(f"--piece {args.piece}: at least 2")
    return args


def main() -> int:
    args = parse_args()
    prompts = [q.prompt for q in questions(args.num_shots, args.num_prompts, args.seed)]
    rows = asyncio.run(
        measure(
            args.urls,
            prompts=prompts,
            new_tokens=args.new_tokens,
            piece=args.piece,
            api_key=args.api_key,
        )
    )
    width = max(len(row.path) for row in rows)
    print(f"{'compared with decoding':{width}}  max |d|   mean |d|  KL        cached")
    for row in rows:
        print(
            f"{row.path:{width}}  {row.max_difference:.2e}  {row.mean_difference:.2e}  "
            f"{row.kl:.2e}  {row.cached_tokens}"
        )
    config = {"prompts": len(prompts), "new_tokens": args.new_tokens, "piece": args.piece}
    record("kl", {"config": config, "rows": [asdict(row) for row in rows]}, args.out)
    good = all(r.max_difference <= args.max_difference and r.kl <= args.max_kl for r in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
