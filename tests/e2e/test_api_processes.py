"""A real worker with several API processes: texts and health are those of one process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from support.client import sse_events
from support.processes import Running, get_json, post_json, status_of, wait_until
from support.procfs import descendants


def test_texts_equal_those_of_one_process(small_worker: str, other_worker: Running) -> None:
    """The small model over many streams at once, greedy and seeded."""
    prompts = [f"What is {i} + {2 * i}?" for i in range(20)]

    async def texts(url: str) -> list[str]:
        # Each request on a new connection, which may be another process's.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(base_url=url, connector=connector) as http:

            async def one(index: int, prompt: str) -> str:
                message = {"role": "user", "content": prompt}
                body = {"model": "mla-small", "messages": [message], "max_tokens": 24}
                body |= {"stream": True, "temperature": index % 2, "seed": index}
                response = await http.post("/v1/chat/completions", json=body)
                chunks = [event async for event in sse_events(response)]
                assert chunks.pop() == "[DONE]"
                deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
                return "".join(delta.get("content") or "" for delta in deltas)

            return list(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))

    assert asyncio.run(texts(other_worker.url)) == asyncio.run(texts(small_worker))
    infos = [get_json(other_worker.url + "/get_server_info") for _ in range(10)]
    assert len({info["boot_id"] for info in infos}) == 1


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_health_of_a_worker_whose_scheduler_is_stopped(other_worker: Running) -> None:
    """The scheduler is idle, then within an answer. Each API process detects it."""
    health = other_worker.url + "/health"
    pid = next(p.number for p in descendants(other_worker.pid) if "scheduler" in p.command)
    assert {"status", "last_step_age", "has_work"} == set(get_json(health))
    for _ in range(2):
        with frozen(pid):
            wait_until(lambda: status_of(health) == 503, "it is found")
            # of whichever process answers
            wait_until(lambda: all(status_of(health) == 503 for _ in range(6)), "by all of them")
        wait_until(lambda: all(status_of(health) == 200 for _ in range(6)), "it moves again")
    answer = post_json(other_worker.url + "/generate", {"text": "a"})
    assert answer["text"]
