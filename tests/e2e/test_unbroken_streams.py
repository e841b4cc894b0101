"""Workers are killed during streams. Text, ids and counts of the clients stay the same."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import urllib.request
from collections import defaultdict
from typing import Any

import aiohttp
import pytest

from support import client, processes
from support.procfs import descendants, listener

# Kills of schedulers and servers in turn, until one has hit a running stream. test_failover.py kills a server.
KILLS = [1, pytest.param(6, marks=pytest.mark.slow)]
TOKENS = 60
# Between two requests of a client. Without it they would take the cores from a worker that starts again.
PAUSE_S = 3.0

Request = tuple[str, dict[str, Any]]


def requests() -> list[Request]:
    """Makes requests: greedy and seeded, text and ids, one prompt and two."""
    requests: list[Request] = []
    for number in range(2):
        text = f"Stream number {number} says something about"
        openai = {"model": "mla-small", "stream": True, "stream_options": {"include_usage": True}}
        openai |= {"max_tokens": TOKENS, "ignore_eos": True}
        hot = {"temperature": 1.0, "seed": number}
        cold = {"temperature": 0.0}
        native = {"max_new_tokens": TOKENS, "ignore_eos": True}
        messages = [{"role": "user", "content": text}]
        requests += [
            ("/v1/chat/completions", openai | cold | {"messages": messages}),
            ("/v1/chat/completions", openai | hot | {"messages": messages}),
            ("/v1/completions", openai | hot | {"prompt": [text, "Another one says"]}),
            ("/generate", {"text": text, "stream": True, "sampling_params": native | cold}),
        ]
    return requests


async def said(http: aiohttp.ClientSession, url: str, request: Request) -> dict[str, Any]:
    """Returns the text, ids and end of each choice of a stream, and the counts. The grouping of tokens into events and
    the cached tokens are left out, because they differ between runs."""
    path, body = request
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, list[Any]] = defaultdict(list)
    names: set[tuple[str, int]] = set()
    counts: list[Any] = []
    roles = done = 0
    async with http.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        assert "x-mla-replay" not in response.headers
        async for event in client.sse_events(response):
            assert done == 0, f"behind the end: {event}"
            if event == "[DONE]":
                done += 1
                continue
            chunk = json.loads(event)
            assert "error" not in chunk, chunk
            if path == "/generate":
                meta = chunk["meta_info"]
                names.add((meta["id"], 0))
                texts[0] = chunk["text"]
                ends[0] = [chunk["output_ids"], meta["finish_reason"]]
                counts = [meta["prompt_tokens"], meta["completion_tokens"]]
                continue
            names.add((chunk["id"], chunk["created"]))
            if usage := chunk.get("usage"):
                counts.append([usage["prompt_tokens"], usage["completion_tokens"]])
            for choice in chunk["choices"]:
                delta = choice.get("delta", choice)
                roles += "role" in delta
                texts[choice["index"]] += delta.get("text") or delta.get("content") or ""
                ends[choice["index"]] += (
                    [choice["finish_reason"]] if choice["finish_reason"] else []
                )
    assert done == 1, "the stream broke off"
    assert len(names) == 1, names
    return {"texts": texts, "ends": ends, "counts": counts, "roles": roles}


def busy_workers(url: str) -> list[str]:
    return [entry["url"] for entry in processes.workers(url) if entry["requests"]]


def continued(url: str) -> int:
    with urllib.request.urlopen(url + "/metrics") as response:
        page = response.read().decode()
    (count,) = re.findall(r'mla_router_replays_total\{outcome="continued"\} (\d+)', page)
    return int(count)


@pytest.mark.parametrize("kills", KILLS)
def test_kill_9_under_streams_changes_nothing_for_their_clients(
    mortal_server: processes.Running, kills: int
) -> None:
    asyncio.run(kill_under_streams(mortal_server, kills, random.Random(kills)))


async def kill_under_streams(server: processes.Running, kills: int, rng: random.Random) -> None:
    continued_before = continued(server.url)
    finished = [0] * len(requests())
    stopping = asyncio.Event()

    async def ask(number: int, request: Request, expected: dict[str, Any]) -> None:
        while not stopping.is_set():
            assert await said(http, server.url, request) == expected, request
            finished[number] += 1
            await asyncio.sleep(PAUSE_S)

    async with client.session() as http:
        expected = [await said(http, server.url, request) for request in requests()]
        async with asyncio.TaskGroup() as group:
            for number, pair in enumerate(zip(requests(), expected, strict=True)):
                group.create_task(ask(number, *pair))
            kill = 0
            while kill < kills or continued(server.url) == continued_before:
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                await asyncio.to_thread(kill_one, server, rng, scheduler=kill % 2 == 0)
                # Every stream has ended since then: a request meets only a few kills.
                before = list(finished)
                while any(now <= then for now, then in zip(finished, before, strict=True)):
                    await asyncio.sleep(0.05)
                kill += 1
            stopping.set()


def kill_one(server: processes.Running, rng: random.Random, *, scheduler: bool) -> None:
    """Kills the API process or the scheduler of a worker with requests, and waits for its return."""
    url = rng.choice(processes.wait_until(lambda: busy_workers(server.url), "there are requests"))
    before = processes.get_json(url + "/get_server_info")["boot_id"]
    pid = listener(int(url.rpartition(":")[2]))
    if scheduler:
        (pid,) = [p.number for p in descendants(pid) if "scheduler" in p.command]
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        entries = processes.healthy_workers(server.url)
        return len(entries) == 2 and all(entry["boot_id"] != before for entry in entries)

    processes.wait_until(is_back, f"{url} is back")
