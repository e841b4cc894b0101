"""Minutes of faults in real workers, without lost requests or wrong answers.

    python bench/serving/soak.py               # --minutes 1 for a try; CPU, the small model

It runs `launch_server` with two workers, and clients that request texts, streams and grammars. The right answers are
recorded before the first fault. Then schedulers are stopped (SIGSTOP; their HTTP servers continue) or killed, API
processes and processes of grammars are killed, clients send grammars that take minutes to compile, bodies of a byte
per second, and bursts of many requests. One worker is faulty at a time.

Each request must end within its deadline, with the right answer or with an error in `ALLOWED`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launched import launched
from soak_report import report

WORKERS = 2
CLIENTS = 6
DEADLINE_S = 60
SLACK_S = 1.0
BURST = 200  # requests at once
NOTICED_S = 2.0  # time until a fault of a worker is visible
BOMB = "a?" * 5000 + "a" * 5000
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "even": {"type": "boolean"}},
    "required": ["sum", "even"],
    "additionalProperties": False,
}
# Allowed ends besides the right answer, by kind of request. An overloaded router may refuse all of them.
ALLOWED = {
    "bomb": {(400, "invalid_grammar"), (503, "engine_died")},
    "upload": {(408, "request_timeout")},
}
OVERLOADED = {429}
# A request that was on one worker after the other when they were struck is suspected, rightly, of having done it.
SUSPECTED = (500, "request_kills_workers")


@dataclass(frozen=True)
class Ask:
    kind: str
    path: str
    body: dict[str, Any]

    @property
    def name(self) -> str:
        return json.dumps(self.body, sort_keys=True)


def questions() -> list[Ask]:
    asks = []
    for n in range(6):
        messages = [{"role": "user", "content": f"What is {17 + n} + {25 - n}?"}]
        chat = {"model": "mla-small", "messages": messages, "max_tokens": 24, "temperature": 0}
        asks += [
            Ask("chat", "/v1/chat/completions", chat),
            Ask("stream", "/v1/chat/completions", chat | {"stream": True, "min_tokens": 20}),
        ]
        schema = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
        asks.append(
            Ask(
                "grammar",
                "/v1/chat/completions",
                chat | {"response_format": schema, "stream": True},
            )
        )
    return asks


class Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code = status, code


@dataclass
class Ends:
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)
    # The longest pause of a stream, by kind of request and by the current fault.
    pauses: dict[str, float] = field(default_factory=dict)


class Clients:
    def __init__(self, http: aiohttp.ClientSession, url: str, rng: random.Random) -> None:
        self.http, self.url, self.rng = http, url, rng
        self.ends = Ends()
        self.expected: dict[str, str] = {}
        self.asks = questions()
        self.trouble = "none"
        self.strikes = 0
        self._bombs = 0

    async def learn(self) -> None:
        for ask in self.asks:
            self.expected[ask.name] = await self.text(ask)

    async def text(self, ask: Ask) -> str:
        """Returns the complete answer. Raises Refused, and ValueError for an invalid answer."""
        async with self.http.post(self.url + ask.path, json=ask.body) as answer:
            if answer.status != 200:
                error = (await answer.json())["error"]
                raise Refused(answer.status, str(error["code"]))
            if not ask.body.get("stream"):
                return str((await answer.json())["choices"][0]["message"]["content"])
            text, done, last = "", False, time.monotonic()
            async for line in answer.content:
                now = time.monotonic()
                if text:
                    where = f"{ask.kind}, {self.trouble}"
                    self.ends.pauses[where] = max(self.ends.pauses.get(where, 0.0), now - last)
                last = now
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if done := data == b"[DONE]":
                    break
                event = json.loads(data)
                if "error" in event:
                    raise Refused(500, str(event["error"]["code"]))
                text += event["choices"][0]["delta"].get("content") or ""
            if not done:
                raise ValueError("the stream has no [DONE]")
            return text

    async def one(self, ask: Ask) -> str:
        strikes = self.strikes
        try:
            text = await self.text(ask)
        except Refused as refused:
            if refused.status in OVERLOADED:
                return "refused: busy"
            if (refused.status, refused.code) in ALLOWED.get(ask.kind, ()):
                return f"refused: {refused}"
            if (refused.status, refused.code) == SUSPECTED and self.strikes - strikes >= WORKERS:
                return f"refused: {refused}"
            raise
        if ask.kind != "bomb" and text != self.expected[ask.name]:
            raise ValueError(f"{text!r} instead of {self.expected[ask.name]!r}")
        return "answered"

    async def timed(self, kind: str, end: Callable[[], Awaitable[str]]) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S + SLACK_S):
                self.ends.ended[f"{kind} {await end()}"] += 1
        except TimeoutError:
            self.ends.ended["lost"] += 1
            self.ends.wrong.append(f"{kind}: no end within {DEADLINE_S + SLACK_S:g} s")
        except (Refused, ValueError, KeyError, aiohttp.ClientError) as error:
            self.ends.ended["wrong"] += 1
            self.ends.wrong.append(f"{kind}: {error!r}")
        took = time.monotonic() - begun
        self.ends.slowest[kind] = max(self.ends.slowest.get(kind, 0.0), took)

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            ask = self.rng.choice(self.asks)
            await self.timed(ask.kind, lambda ask=ask: self.one(ask))

    async def bombs(self, until: float) -> None:
        while time.monotonic() < until:
            self._bombs += 1
            body = self.asks[0].body | {"regex": f"{self._bombs}{BOMB}", "stream": True}
            ask = Ask("bomb", "/v1/chat/completions", body)
            await self.timed("bomb", lambda ask=ask: self.one(ask))
            await asyncio.sleep(self.rng.uniform(2, 8))

    async def bursts(self, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(self.rng.uniform(15, 30))
            asks = [self.rng.choice(self.asks) for _ in range(BURST)]
            await asyncio.gather(
                *(self.timed("burst", lambda ask=ask: self.one(ask)) for ask in asks)
            )

    async def uploads(self, until: float) -> None:
        """Uploads bodies, one byte per second."""
        while time.monotonic() < until:
            await self.timed("upload", self._upload)

    async def _upload(self) -> str:
        async def drip() -> Any:
            for byte in b"x" * 10 * DEADLINE_S:
                yield bytes([byte])
                await asyncio.sleep(1)

        try:
            async with self.http.post(self.url + "/v1/chat/completions", data=drip()) as answer:
                if answer.status == 408:
                    return "refused: 408"
                raise Refused(answer.status, await answer.text())
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return "closed"


def processes(title: str) -> list[int]:
    """Returns the descendants of this process whose title begins with `title`."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")[0].decode()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat[1])
    found = []
    for pid, name in titles.items():
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and name.startswith(title):
            found.append(pid)
    return found


FAULTS = {
    "scheduler stopped": ("mla_router scheduler", signal.SIGSTOP),
    "scheduler killed": ("mla_router scheduler", signal.SIGKILL),
    "server killed": ("mla_router server", signal.SIGKILL),
    "grammar worker killed": ("mla_router grammar worker", signal.SIGKILL),
    "grammar fork server killed": ("mla_router grammar fork server", signal.SIGKILL),
    "grammar supervisor killed": ("mla_router grammar supervisor", signal.SIGKILL),
}


async def chaos(clients: Clients, until: float, struck: Counter[str]) -> None:
    rng = clients.rng
    while time.monotonic() < until:
        await asyncio.sleep(rng.uniform(1, 5))
        fault = rng.choice(list(FAULTS))
        title, number = FAULTS[fault]
        victims = processes(title)
        if not victims:
            continue
        victim = rng.choice(victims)
        try:
            os.kill(victim, number)
        except ProcessLookupError:  # a process of a grammar ends with its last request
            continue
        struck[fault] += 1
        clients.strikes += 1
        clients.trouble = fault
        if number == signal.SIGSTOP:
            await asyncio.sleep(rng.uniform(2, 8))
            with contextlib.suppress(ProcessLookupError):  # it was replaced in the meantime
                os.kill(victim, signal.SIGCONT)
        await asyncio.sleep(NOTICED_S)
        await until_healthy(clients)
        clients.trouble = "none"


async def until_healthy(clients: Clients) -> None:
    while True:
        async with clients.http.get(clients.url + "/workers") as answer:
            workers = (await answer.json())["workers"]
        if sum(worker["healthy"] for worker in workers) == WORKERS:
            return
        await asyncio.sleep(0.2)


async def soak(args: argparse.Namespace, url: str) -> dict[str, Any]:
    struck: Counter[str] = Counter()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as http:
        clients = Clients(http, url, random.Random(args.seed))
        await clients.learn()
        until = time.monotonic() + 60 * args.minutes
        await asyncio.gather(
            chaos(clients, until, struck),
            clients.bombs(until),
            clients.bursts(until),
            clients.uploads(until),
            *(clients.run(until) for _ in range(CLIENTS)),
        )
    ends = clients.ends
    return {
        "seed": args.seed,
        "minutes": args.minutes,
        "faults": dict(sorted(struck.items())),
        "ended": dict(sorted(ends.ended.items())),
        "lost": ends.ended["lost"],
        "wrong": ends.ended["wrong"],
        "slowest_s": {kind: round(value, 1) for kind, value in sorted(ends.slowest.items())},
        "longest_pause_s": {what: round(value, 2) for what, value in sorted(ends.pauses.items())},
        "problems": ends.wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn and printed")
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    args = parser.parse_args()
    args.seed = random.randrange(1 << 32) if args.seed is None else args.seed
    print(f"seed {args.seed}", flush=True)
    flags = [
        "--device=cpu",
        "--cpu-threads=1",
        f"--router-request-timeout-secs={DEADLINE_S}",
        "--router-queue-size=64",
        "--router-queue-timeout-secs=30",
    ]
    with launched(flags, workers=WORKERS) as url:
        result = asyncio.run(soak(args, url))
    return report(
        "serving_soak",
        result,
        args.out,
        tables=("faults", "ended", "slowest_s", "longest_pause_s"),
        summary=f"wrong {result['wrong']}, lost {result['lost']}",
    )


if __name__ == "__main__":
    sys.exit(main())
