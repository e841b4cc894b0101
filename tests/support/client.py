"""A simple client of `/generate` for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    worker: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    body: str


def session() -> aiohttp.ClientSession:
    """Returns a session without limits on connections and time. A test decides how many requests are open, and pytest
    ends a test that hangs."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


def request_body(tokens: list[int], max_new_tokens: int, **extra: Any) -> dict[str, Any]:
    """Returns the body of a greedy request for exactly `max_new_tokens` tokens."""
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
    return {"input_ids": tokens, "sampling_params": sampling} | extra


async def generate(
    http: aiohttp.ClientSession, url: str, tokens: list[int], max_new_tokens: int, **extra: Any
) -> Answer:
    body = request_body(tokens, max_new_tokens, **extra)
    async with http.post(url + "/generate", json=body) as response:
        text = await response.text()
        return parse_answer(response.status, response.headers.get("x-mla-worker", ""), text)


async def generate_all(url: str, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Answer]:
    """Sends all prompts at once. The answers have logprobs."""
    async with session() as http:
        return await asyncio.gather(
            *(generate(http, url, p, max_new_tokens, return_logprob=True) for p in prompts)
        )


def parse_answer(status: int, worker: str, text: str) -> Answer:
    if status != 200:
        return Answer(status, worker, [], [], "", 0, 0, text)
    answer = json.loads(text)
    meta = answer["meta_info"]
    return Answer(
        status=status,
        worker=worker,
        tokens=answer["output_ids"],
        logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or []],
        finish_reason=meta["finish_reason"]["type"],
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        body=text,
    )


async def sse_events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Returns the data of each server-sent event, `[DONE]` included."""
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line.removeprefix(b"data:").strip().decode()
