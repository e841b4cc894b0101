"""A mixture of all kinds of requests, some of which the client leaves before their end."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

LEFT_SHARE = 0.3
MAX_TOKENS = 16
ENDLESS_TOKENS = 400  # of a request that the client leaves before its end
MAX_EVENTS = 12  # the client leaves a stream after at most this many events
MAX_SECONDS = 0.4  # the client leaves a response in one piece after at most this time
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")
IDS = 200  # every tokenizer has these ids


@dataclass
class Mixture:
    """Draws requests from `rng`. Counts their ends in `ends` and their kinds in `kinds`."""

    url: str
    model: str
    rng: random.Random
    ends: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._shared = [self._ids(200) for _ in range(4)]

    async def run(self, http: aiohttp.ClientSession, requests: int, concurrency: int) -> None:
        todo = iter(range(requests))

        async def client() -> None:
            for _ in todo:
                await self._one(http)

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def _one(self, http: aiohttp.ClientSession) -> None:
        leave, stream = self.rng.random() < LEFT_SHARE, self.rng.random() < 0.5
        path, body = self._request(ENDLESS_TOKENS if leave else None, stream)
        self.kinds.update([path, "streamed" if stream else "whole"])
        try:
            if leave:
                await self._leave(http, path, body)
            else:
                await _finish(http, self.url + path, body)
                self.ends["answered"] += 1
        except (aiohttp.ClientError, BrokenAnswer, ValueError) as error:
            self.ends[f"failed: {type(error).__name__}: {error}"[:200]] += 1

    async def _leave(self, http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
        async def ask() -> None:
            async with http.post(self.url + path, json=body) as response:
                if response.status != 200:
                    raise BrokenAnswer(f"{response.status} {await response.text()}")
                left_after = self.rng.randint(0, MAX_EVENTS) if body["stream"] else -1
                async for _ in response.content:
                    left_after -= 1
                    if left_after == 0:
                        break
                response.close()

        patience = None if body["stream"] else self.rng.uniform(0, MAX_SECONDS)
        try:
            await asyncio.wait_for(ask(), patience)
            self.ends["stream left" if body["stream"] else "answered before it was left"] += 1
        except TimeoutError:
            self.ends["hung up"] += 1

    def _request(self, tokens: int | None, stream: bool) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        path = rng.choice(PATHS)
        several = rng.choice((1, 1, 1, 2, 3))
        endless = tokens is not None
        tokens = tokens or rng.randint(1, MAX_TOKENS)
        sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": endless or rng.random() < 0.5}
        if rng.random() < 0.5:
            self.kinds["sampled"] += 1
            sampling |= {"temperature": rng.uniform(0.2, 2), "top_p": rng.uniform(0.1, 1)}
            sampling |= {"top_k": rng.choice((-1, 5, 50))}
        if not endless and rng.random() < 0.3:
            self.kinds["stops"] += 1
            sampling["stop"] = rng.sample(["a", "e", " ", "th", "\n"], 2)
        if several > 1:
            self.kinds["several answers"] += 1
        if path == "/generate":
            prompts = [self._prompt() for _ in range(several)]
            body: dict[str, Any] = {"input_ids": prompts if several > 1 else prompts[0]}
            return path, {
                **body,
                "sampling_params": {"max_new_tokens": tokens, **sampling},
                "stream": stream,
            }
        body = {"model": self.model, "max_tokens": tokens, "stream": stream, **sampling}
        if path == "/v1/completions":
            prompts = [self._prompt() for _ in range(rng.choice((1, 1, several)))]
            return path, body | {"prompt": prompts, "n": several if len(prompts) == 1 else 1}
        question = f"Tell me about number {rng.randrange(50)}."
        return path, body | {"messages": [{"role": "user", "content": question}], "n": several}

    def _prompt(self) -> list[int]:
        """Draws a prompt. Half of them share a prefix, so that the cache is used."""
        shared = self.rng.choice(self._shared) if self.rng.random() < 0.5 else []
        return shared + self._ids(self.rng.randint(1, 150))

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(3, IDS) for _ in range(count)]


class BrokenAnswer(Exception):
    """The answer is an error or does not end."""


async def _finish(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with http.post(url, json=body) as response:
        if response.status != 200:
            raise BrokenAnswer(f"{response.status} {await response.text()}")
        if not body["stream"]:
            json.loads(await response.read())
            return
        last = b""
        async for line in response.content:
            if line.startswith(b"data: {") and b'"error":{' in line[:20]:
                raise BrokenAnswer(line.decode(errors="replace"))
            last = line.strip() or last
        if last != b"data: [DONE]":
            raise BrokenAnswer(f"a stream that ends with {last[-100:]!r}")
