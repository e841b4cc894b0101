"""Streams of the shipped model that must be complete after a fault, and the same answers in one piece."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from support import client
from support.procfs import Pid

TOKENS = 240


@dataclass
class Stream:
    """The part of a stream that a client has received."""

    text: str = ""
    reason: str | None = None
    usage: dict[str, int] | None = None
    identities: set[tuple[str, int]] = field(default_factory=set)
    done: bool = False
    longest_gap_s: float = 0.0
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, response: aiohttp.ClientResponse) -> None:
        assert response.status == 200, await response.text()
        last = time.monotonic()
        async for data in client.sse_events(response):
            last, before = time.monotonic(), last
            self.longest_gap_s = max(self.longest_gap_s, last - before)
            assert not self.done, data
            if data == "[DONE]":
                self.done = True
                continue
            event = json.loads(data)
            assert "error" not in event, event
            self.identities.add((event["id"], event["created"]))
            self.usage = event.get("usage") or self.usage
            for choice in event["choices"]:
                self.text += choice["text"]
                assert self.reason is None, "a token after the last"
                self.reason = choice["finish_reason"]
            self.has_begun.set()

    def end(self) -> tuple[str, str | None, int]:
        assert self.done and len(self.identities) == 1, (self.done, self.identities)
        assert self.usage is not None
        return self.text, self.reason, self.usage["completion_tokens"]


def body(number: int, *, stream: bool, tokens: int = TOKENS) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "model": "mla-small",
        "prompt": f"Number {number} of a list that goes on:",
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": number,
        "ignore_eos": True,
    }
    return asked | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


async def whole(
    http: aiohttp.ClientSession, url: str, number: int, tokens: int = TOKENS
) -> tuple[str, str, int]:
    asked = body(number, stream=False, tokens=tokens)
    async with http.post(url + "/v1/completions", json=asked) as response:
        answer = await response.json()
        assert response.status == 200, answer
    (choice,) = answer["choices"]
    return choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]


async def streamed(
    http: aiohttp.ClientSession, url: str, number: int, stream: Stream
) -> tuple[str, str | None, int]:
    async with http.post(url + "/v1/completions", json=body(number, stream=True)) as response:
        await stream.read(response)
    return stream.end()


async def answers(url: str, count: int) -> list[tuple[str, str | None, int]]:
    """Returns the answers of the first `count` requests, each in one piece."""
    async with client.session() as http:
        return await asyncio.gather(*(whole(http, url, number) for number in range(count)))


async def interrupted(
    url: str, count: int, victim: Pid, fault: signal.Signals
) -> list[tuple[str, str | None, int]]:
    """Returns the answers of `count` streams that have all begun when `fault` is sent to `victim`."""
    async with client.session() as http:
        streams = [Stream() for _ in range(count)]
        asked = [
            asyncio.create_task(streamed(http, url, number, stream))
            for number, stream in enumerate(streams)
        ]
        await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
        os.kill(victim.number, fault)
        return await asyncio.gather(*asked)
