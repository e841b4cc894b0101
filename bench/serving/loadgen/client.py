"""Sends one request and measures its times. Every failure is a part of the outcome."""

from __future__ import annotations

import json
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from loadgen.apis import Answer, Api, BadAnswer

MAX_EVENT_BYTES = 64 << 20
MAX_ERROR_CHARS = 300


@dataclass(slots=True)
class Outcome:
    """One request, answered or not. Times in seconds on the monotonic clock."""

    turn: int  # in its conversation, from 0
    prompt_tokens: int  # new tokens of this turn, counted by the client
    asked_tokens: int
    latency: float = 0.0  # from sending to the end of the answer
    ttft: float | None = None  # to the first text; None if nothing was streamed
    gaps: array[float] = field(default_factory=lambda: array("d"))  # between events with text
    answer: Answer = field(default_factory=Answer)
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


def open_session(api_key: str | None, timeout: float) -> aiohttp.ClientSession:
    """Returns the session of a run. It reuses connections, and does not limit their number."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


class Client:
    """Asks one endpoint."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, api: Api) -> None:
        self._http = http
        self._url = base_url + api.path
        self._api = api
        self._headers = {"Content-Type": "application/json"}

    async def send(self, body: dict[str, Any], outcome: Outcome) -> None:
        """Fills in the outcome. Failures of the server or the network raise nothing."""
        data = json.dumps(body).encode()
        start = time.perf_counter()
        try:
            async with self._http.post(self._url, data=data, headers=self._headers) as response:
                if response.status != 200:
                    outcome.error = f"HTTP {response.status}: {await _reason(response)}"
                elif body["stream"]:
                    await self._read_stream(response, outcome, start)
                else:
                    self._api.read(await response.read(), outcome.answer)
            if outcome.ok and outcome.answer.finish_reason is None:
                outcome.error = "the answer has no finish_reason"
        except TimeoutError:  # before OSError, which it is from Python 3.11 on
            outcome.error = "no answer in time (--request-timeout)"
        except (aiohttp.ClientError, OSError, BadAnswer, msgspec.MsgspecError) as error:
            outcome.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        outcome.latency = time.perf_counter() - start

    async def _read_stream(
        self, response: aiohttp.ClientResponse, outcome: Outcome, start: float
    ) -> None:
        read, answer, gaps = self._api.read, outcome.answer, outcome.gaps
        tail, last, done = b"", 0.0, False
        async for piece in response.content.iter_any():
            now = time.perf_counter()
            lines = (tail + piece).split(b"\n")
            tail = lines.pop()
            if len(tail) > MAX_EVENT_BYTES:
                raise BadAnswer(f"an event of more than {MAX_EVENT_BYTES} bytes")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    done = True
                elif read(data, answer):
                    if outcome.ttft is None:
                        outcome.ttft = now - start
                    else:
                        gaps.append(now - last)
                    last = now
        if not done:
            raise BadAnswer("the stream ended without [DONE]")
        if outcome.ttft is None:  # tokens without text, or no tokens
            outcome.ttft = time.perf_counter() - start


async def _reason(response: aiohttp.ClientResponse) -> str:
    """Returns OpenAI's error message if there is one, else the beginning of the body."""
    text = await response.text(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])[:MAX_ERROR_CHARS]
    except (ValueError, KeyError, TypeError):
        return text[:MAX_ERROR_CHARS].strip() or str(response.reason)
