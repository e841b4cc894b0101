"""Clients leave at random times, and no page or slot is lost.

They leave while their request waits, while its prompt is computed and while it decodes; with or without streaming,
with or without the router, by closing the connection or by `/abort_request`.
"""

from __future__ import annotations

import asyncio
import collections
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support import client, processes
from support.reference import Reference
from support.tiny_model import CONFIGS, write_tiny_model

# (requests, workers)
ABORTS = [(150, 1), pytest.param(1_000, 2, marks=pytest.mark.slow)]
CONCURRENCY = 48  # more than the workers' places together, so that some requests wait
CONTEXT = 32_768
ENDLESS = 20_000  # tokens: no request may end by itself before it is left, however late that is
WORKER: dict[str, processes.Flag] = {
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
    "max_total_tokens": CONTEXT,
    "max_queued_requests": CONCURRENCY,
}


class Storm:
    """Sends requests, and leaves each one at a random time."""

    def __init__(self, router: str, workers: list[str], rng: random.Random) -> None:
        self.urls = [router, *workers]
        self.workers = workers
        self.rng = rng
        self.left: collections.Counter[str] = collections.Counter()
        self.states: collections.Counter[str] = collections.Counter()  # at the time of leaving
        self.shared = [rng.randrange(256) for _ in range(600)]

    def prompt(self) -> list[int]:
        """Draws a prompt. Often half of it is shared, so that the cache is used."""
        start = self.shared[: self.rng.choice((0, 0, 40, 600))]
        return start + [self.rng.randrange(256) for _ in range(self.rng.randint(1, 300))]

    async def run(self, http: aiohttp.ClientSession, count: int) -> None:
        todo = iter(range(count))

        async def leave_many() -> None:
            for number in todo:
                kind = self.rng.choice((self.hang_up, self.leave_stream, self.ask_for_abort))
                await kind(http, f"storm-{number}")

        await asyncio.gather(*(leave_many() for _ in range(CONCURRENCY)))

    async def hang_up(self, http: aiohttp.ClientSession, rid: str) -> None:
        """A client of a non-streamed request closes its connection at a random time."""
        url, body = self.rng.choice(self.urls), client.request_body(self.prompt(), ENDLESS)

        async def ask() -> None:
            async with http.post(url + "/generate", json=body | {"rid": rid}) as response:
                raise AssertionError(f"not left in time: {response.status} {await response.text()}")

        try:
            await asyncio.wait_for(ask(), self.rng.choice((0.002, 0.02, 0.1, 0.3)))
        except TimeoutError:
            self.left["hung up"] += 1
            await self.look(http)

    async def look(self, http: aiohttp.ClientSession) -> None:
        """Counts the waiting and running requests: the test must meet both states."""
        async with http.get(self.rng.choice(self.workers) + "/get_server_info") as response:
            state = (await response.json())["scheduler"]
        self.states.update(waiting=state["waiting"], running=state["running"])

    async def leave_stream(self, http: aiohttp.ClientSession, rid: str) -> None:
        """A client of a stream closes it after a random number of events."""
        url, body = self.rng.choice(self.urls), client.request_body(self.prompt(), ENDLESS)
        events, wanted = 0, self.rng.choice((0, 1, 2, 10, 30))
        body |= {"rid": rid, "stream": True}
        async with http.post(url + "/generate", json=body) as response:
            assert response.status == 200, await response.text()
            if wanted:
                async for event in client.sse_events(response):
                    assert event != "[DONE]", "not left in time"
                    events += bool(event)
                    if events == wanted:
                        break
            response.close()
        self.left["left a stream"] += 1

    async def ask_for_abort(self, http: aiohttp.ClientSession, rid: str) -> None:
        """A client calls `/abort_request`. The answer has the text so far and the reason."""
        url = self.rng.choice(self.workers)
        asked = asyncio.create_task(
            client.generate(http, url, self.prompt(), ENDLESS, rid=rid, stream=False)
        )
        await asyncio.wait((asked,), timeout=self.rng.choice((0.002, 0.02, 0.1, 0.3)))
        while not asked.done():  # an abort may arrive before its request, and has no effect then
            async with http.post(url + "/abort_request", json={"rid": rid}) as response:
                assert response.status == 200, await response.text()
            await asyncio.wait((asked,), timeout=0.5)
        answer = asked.result()
        assert (answer.status, answer.finish_reason) == (200, "abort"), answer.body
        self.left["asked for abort"] += 1


def scheduler_state(url: str) -> dict[str, Any]:
    state: dict[str, Any] = processes.get_json(url + "/get_server_info")["scheduler"]
    return state


def wait_until_idle(url: str) -> dict[str, Any]:
    """After a closed connection there is no answer, so the test polls for the end of the abort."""

    def idle() -> dict[str, Any] | None:
        state = scheduler_state(url)
        return state if state["running"] + state["waiting"] == 0 else None

    return processes.wait_until(idle, f"{url} has nothing left to do")


@pytest.mark.parametrize(("count", "dp_size"), ABORTS)
def test_aborts_leak_nothing(count: int, dp_size: int, tmp_path: Path) -> None:
    rng = random.Random(count)
    write_tiny_model(tmp_path, **CONFIGS["v3"] | {"max_position_embeddings": CONTEXT})
    reference = Reference(tmp_path)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (5, 64, 700)]
    expected = [reference.greedy(prompt, 16).tokens for prompt in prompts]

    with processes.server(dp_size, tmp_path, **WORKER) as server:
        workers = [entry["url"] for entry in processes.workers(server.url)]

        async def answers() -> list[list[list[int]]]:
            async with client.session() as http:
                return [
                    [(await client.generate(http, url, prompt, 16)).tokens for prompt in prompts]
                    for url in (server.url, *workers)
                ]

        async def storm() -> collections.Counter[str]:
            async with client.session() as http:
                storm = Storm(server.url, workers, rng)
                await storm.run(http, count)
                assert min(storm.states["waiting"], storm.states["running"]) > count / 10
                return storm.left

        assert asyncio.run(answers()) == [expected] * (1 + dp_size)
        left = asyncio.run(storm())
        print(left)
        assert left.total() == count

        for url in workers:
            state = wait_until_idle(url)
            assert state["free_slots"] == state["total_slots"], state
            assert state["free_pages"] + state["cached_pages"] == state["total_pages"], state

            processes.post_json(url + "/flush_cache", {})
            state = scheduler_state(url)
            assert state["cached_pages"] == 0, state
            assert state["free_pages"] == state["total_pages"], state

        processes.wait_until(
            lambda: not any(entry["requests"] for entry in processes.workers(server.url)),
            "the router counts no requests",
        )
        assert asyncio.run(answers()) == [expected] * (1 + dp_size)
