"""The clients of the soak: mixed requests with known answers, which are compared byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DEADLINE_S = 30  # the router's deadline of a request
CLIENT_TIMEOUT_S = DEADLINE_S + 1.0  # a client without an end by then has lost its request
BODY_PAUSE_S = 3  # longest allowed pause in an upload
ABORTS = 0.08  # share of clients that leave during the answer
SLOW_READERS = 0.05
SLOW_READ_PAUSE = 0.03
BURST = 400  # requests at once, several times what engines and queue have room for
BURST_PAUSES_S = (10, 25)  # from the end of a burst to the next, drawn in between

# What a request that is not aborted may end with, besides its right answer. At least two of the
# four workers are well at any time, so nothing else is forgiven.
ALLOWED = {
    # Two workers broke the connection when they had this request: both that were unwell.
    (500, "request_kills_workers"),
    # The same in the middle of a stream.
    (500, "stream_not_continued"),
}
# Beside a burst, any request may be refused: by the router, or with the 429 or 503 of a worker, which has no code.
OVERLOADED = {
    (429, "queue_full"),
    (429, "queue_slow"),
    (429, None),
    (503, None),
    (503, "queue_timeout"),
}


class Wrong(Exception):
    """An end that no fault justifies."""


@dataclass
class Ends:
    """Counts of requests: each adds one to `sent` and one to `ended`."""

    sent: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)  # endless uploads
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    longest_pause: float = 0.0
    bursts: int = 0
    bursts_running: int = 0
    last_burst_end: float = 0.0

    @contextlib.contextmanager
    def burst(self) -> Iterator[None]:
        self.bursts += 1
        self.bursts_running += 1
        try:
            yield
        finally:
            self.bursts_running -= 1
            self.last_burst_end = time.monotonic()

    def met_burst(self, begun: float) -> bool:
        """Whether a request that began then, and ends now, ran beside a burst."""
        return self.bursts_running > 0 or begun <= self.last_burst_end


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, Any]
    stream: bool


def some_request(rng: random.Random, systems: list[str]) -> Ask:
    path = rng.choice(["/v1/chat/completions"] * 2 + ["/v1/completions", "/generate"])
    tokens, seed = rng.choice([4, 16, 60, 150]), rng.randrange(4)
    system = rng.choice(systems)
    question = "".join(rng.choices(LETTERS, k=rng.choice([20, 200, 2000])))
    if path == "/generate":
        sampling = {"max_new_tokens": tokens, "sampling_seed": seed}
        body: dict[str, Any] = {"text": system + question, "sampling_params": sampling}
    else:
        body = {"model": "mock", "max_tokens": tokens, "seed": seed}
        if path == "/v1/completions":
            body["prompt"] = system + question
        else:
            body["messages"] = [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ]
    return Ask(path, body, stream=rng.random() < 0.7)


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == "/generate":
        return str(answer["text"])
    choice = answer["choices"][0]
    if path == "/v1/completions":
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content", ""))


def reason_of(path: str, answer: dict[str, Any]) -> str | None:
    if path == "/generate":
        reason = answer["meta_info"]["finish_reason"]
        return reason and str(reason["type"])
    reason = answer["choices"][0]["finish_reason"]
    return reason and str(reason)


def counts_of(path: str, answer: dict[str, Any]) -> tuple[int, int]:
    counts = answer["meta_info"] if path == "/generate" else answer["usage"]
    return counts["prompt_tokens"], counts["completion_tokens"]


@dataclass
class Stream:
    """Checks a stream event by event."""

    path: str
    text: str = ""
    reason: str | None = None
    counts: tuple[int, int] | None = None
    identity: Any = None
    done: bool = False
    error: dict[str, Any] | None = None

    def take(self, event: str) -> None:
        for line in event.split("\n"):
            if line.startswith(":"):
                if line.startswith(":mla"):
                    raise Wrong("a line between router and worker has reached the client")
            elif line.startswith("data: "):
                self._data(line.removeprefix("data: "))
            elif line:
                raise Wrong(f"no line of an event: {line[:80]!r}")

    def _data(self, data: str) -> None:
        if self.done or self.error:
            raise Wrong(f"something came after the end: {data[:80]}")
        if data == "[DONE]":
            self.done = True
            return
        body = json.loads(data)
        if "error" in body:
            self.error = body["error"]
            return
        self._same_answer(body)
        if body.get("usage"):
            self.counts = counts_of(self.path, body)
        if self.path == "/generate":
            if not body["text"].startswith(self.text):
                raise Wrong("the text so far has changed")
            self.text = body["text"]
            self.counts = counts_of(self.path, body)
        elif body["choices"]:
            self.text += text_of(self.path, body)
        else:
            return
        if self.reason:
            raise Wrong("a token came after the finish reason")
        self.reason = reason_of(self.path, body)

    def _same_answer(self, body: dict[str, Any]) -> None:
        of = body["meta_info"]["id"] if self.path == "/generate" else (body["id"], body["created"])
        self.identity = self.identity or of
        if of != self.identity:
            raise Wrong(f"{self.identity} has become {of}")


async def slowly_uploaded(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Uploads a body in some pieces, with the longest allowed pauses."""
    whole = json.dumps(body).encode()
    size = -(-len(whole) // 4)
    for at in range(0, len(whole), size):
        yield whole[at : at + size]
        await asyncio.sleep(BODY_PAUSE_S / 6)


@dataclass
class Traffic:
    """Runs one client after the other until it is stopped."""

    http: aiohttp.ClientSession
    router: str
    reference: str
    rng: random.Random
    systems: list[str]
    ends: Ends

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            ask = some_request(self.rng, self.systems)
            await self.counted(ask, await self.expected(ask))

    async def uploads(self, until: float) -> None:
        """Sends slow uploads, and uploads that stop."""
        while time.monotonic() < until:
            ask = some_request(self.rng, self.systems)
            await self.counted(ask, await self.expected(ask), uploads_slowly=True)
            self.ends.uploads[await self.stopped_upload(ask)] += 1

    async def bursts(self, until: float) -> None:
        """Every now and then, far more requests at once than there is room for."""
        while (pause := self.rng.uniform(*BURST_PAUSES_S)) < until - time.monotonic():
            await asyncio.sleep(pause)
            asks = [some_request(self.rng, self.systems) for _ in range(BURST)]
            answers = await asyncio.gather(*map(self.expected, asks))
            with self.ends.burst():
                await asyncio.gather(*map(self.counted, asks, answers))

    async def expected(self, ask: Ask) -> dict[str, Any]:
        """Returns the answer of a worker without faults."""
        async with self.http.post(self.reference + ask.path, json=ask.body) as answer:
            whole: dict[str, Any] = await answer.json()
        return whole

    async def counted(
        self, ask: Ask, expected: dict[str, Any], *, uploads_slowly: bool = False
    ) -> None:
        """Sends one request and counts its end."""
        self.ends.sent += 1
        begun = time.monotonic()
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                end = await self.one(ask, expected, uploads_slowly=uploads_slowly)
        except TimeoutError:
            end = "lost"
            self.ends.wrong.append(
                f"{ask.path} stream={ask.stream}: no end within {CLIENT_TIMEOUT_S:g} s"
            )
        except (Wrong, aiohttp.ClientError, ValueError, KeyError) as error:
            end = "wrong"
            self.ends.wrong.append(f"{ask.path} stream={ask.stream}: {error!r}")
        else:
            self.ends.slowest = max(self.ends.slowest, time.monotonic() - begun)
        self.ends.ended[end] += 1

    async def stopped_upload(self, ask: Ask) -> str:
        """Sends half a body, which must be refused in time."""
        whole = json.dumps(ask.body).encode()

        async def half() -> AsyncIterator[bytes]:
            yield whole[: len(whole) // 2]
            await asyncio.sleep(10 * BODY_PAUSE_S)

        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(2 * BODY_PAUSE_S),
                self.http.post(self.router + ask.path, data=half(), headers=headers) as answer,
            ):
                if answer.status != 408:
                    self.ends.wrong.append(f"half a body: {answer.status}")
                return str(answer.status)
        except TimeoutError:
            self.ends.wrong.append(f"half a body: no end within {2 * BODY_PAUSE_S} s")
            return "no end"
        except aiohttp.ClientError:
            return "closed"  # the connection was closed before the client read the 408

    async def one(self, ask: Ask, expected: dict[str, Any], *, uploads_slowly: bool) -> str:
        options = {"include_usage": True}
        body = ask.body | ({"stream": True, "stream_options": options} if ask.stream else {})
        fate = self.rng.random()
        if uploads_slowly:
            fate = (ABORTS + 1.0) / 2  # the client stays and reads at once
        begun = time.monotonic()
        if not ask.stream and fate < ABORTS:
            with_timeout = aiohttp.ClientTimeout(total=self.rng.uniform(0.001, 0.5))
            try:
                async with self.http.post(
                    self.router + ask.path, json=body, timeout=with_timeout
                ) as answer:
                    await answer.read()
            except TimeoutError:
                return "left"
            return "left too late"
        sent = slowly_uploaded(body) if uploads_slowly else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with self.http.post(self.router + ask.path, data=sent, headers=headers) as answer:
            if answer.status != 200:
                retry_after = answer.headers.get("Retry-After")
                return self.refused(answer.status, await answer.json(), begun, retry_after)
            if not ask.stream:
                whole = await answer.json()
                self.compare(
                    ask.path,
                    expected,
                    text_of(ask.path, whole),
                    reason_of(ask.path, whole),
                    counts_of(ask.path, whole),
                )
                return "answered"
            leaves_after = self.rng.randrange(40) if fate < ABORTS else None
            slowly = fate > 1 - SLOW_READERS
            stream = await self.read(answer, ask.path, leaves_after, slowly)
            if stream is None:
                return "left"
        if stream.error:
            return self.refused(500, {"error": stream.error}, begun)
        if not stream.done:
            raise Wrong("the stream has no [DONE]")
        self.compare(ask.path, expected, stream.text, stream.reason, stream.counts)
        return "streamed slowly" if slowly else "streamed"

    async def read(
        self, answer: aiohttp.ClientResponse, path: str, leaves_after: int | None, slowly: bool
    ) -> Stream | None:
        """Returns the answer; None if the client has left on purpose."""
        stream, buffer, events = Stream(path), "", 0
        last = time.monotonic()
        async for data in answer.content.iter_any():
            self.ends.longest_pause = max(self.ends.longest_pause, time.monotonic() - last)
            buffer += data.decode()
            while "\n\n" in buffer:
                event, _, buffer = buffer.partition("\n\n")
                stream.take(event)
                events += 1
            if leaves_after is not None and events > leaves_after:
                answer.close()
                return None
            if slowly:
                await asyncio.sleep(SLOW_READ_PAUSE)
            last = time.monotonic()
        if buffer:
            raise Wrong(f"half an event: {buffer[:80]!r}")
        return stream

    def compare(
        self,
        path: str,
        expected: dict[str, Any],
        text: str,
        reason: str | None,
        counts: tuple[int, int] | None,
    ) -> None:
        wanted = text_of(path, expected)
        if text != wanted:
            same = next(
                (i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), -1
            )
            raise Wrong(f"{len(text)} bytes for {len(wanted)}, first difference at {same}")
        if reason != reason_of(path, expected):
            raise Wrong(f"finish reason {reason}")
        if counts != counts_of(path, expected):
            raise Wrong(f"usage {counts} for {counts_of(path, expected)}")

    def refused(
        self, status: int, body: dict[str, Any], begun: float, retry_after: str | None = None
    ) -> str:
        error = body["error"]
        if not {"message", "type", "param", "code"} <= error.keys():
            raise Wrong(f"not OpenAI's error shape: {body}")
        end = (status, error["code"])
        if end in OVERLOADED and self.ends.met_burst(begun):
            if retry_after is None and error["code"]:
                raise Wrong(f"{status} {error['code']} without Retry-After")
        elif end not in ALLOWED:
            raise Wrong(f"{status} {error['code']}: {error['message']}")
        return f"refused: {error['code'] or status}"
