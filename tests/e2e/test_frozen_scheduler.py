"""A stopped scheduler with a running API process: the other worker answers its requests."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import aiohttp

from support import client, processes
from support.procfs import descendants, listener
from support.streams import Stream, streamed, whole

STREAMS = 6
WHOLES = 6
# It is 2.5 s on an idle machine.
LONGEST_GAP_S = 10.0


def scheduler_of(worker: str) -> int:
    server = listener(int(worker.rpartition(":")[2]))
    (pid,) = [pid.number for pid in descendants(server) if "mla_router scheduler" in pid.command]
    return pid


def requests_on(url: str, worker: str) -> int:
    return next(int(w["requests"]) for w in processes.workers(url) if w["url"] == worker)


async def served_by(http: aiohttp.ClientSession, url: str) -> set[str]:
    """Returns the names of the workers that answer four requests, sent to all in turn."""
    return {(await client.generate(http, url, [1, 2, 3], 1)).worker for _ in range(4)}


async def freeze_in_the_middle(url: str) -> float:
    """Returns the longest gap of a stream, in seconds."""
    numbers = range(STREAMS + WHOLES)
    victim = processes.workers(url)[0]["url"]
    pid = scheduler_of(victim)
    async with client.session() as http:
        expected = await asyncio.gather(*(whole(http, url, number) for number in numbers))
        streams = [Stream() for _ in range(STREAMS)]
        asked = [
            asyncio.create_task(streamed(http, url, number, stream))
            for number, stream in enumerate(streams)
        ]
        asked += [
            asyncio.create_task(whole(http, url, number)) for number in range(STREAMS, len(numbers))
        ]
        await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
        os.kill(pid, signal.SIGSTOP)
        try:
            caught = await asyncio.to_thread(requests_on, url, victim)
            answers = await asyncio.gather(*asked)
            assert len(processes.healthy_workers(url)) == 1
        finally:
            os.kill(pid, signal.SIGCONT)
        assert caught > STREAMS // 2, "streams and others were on the worker that was stopped"
        for number, answer in enumerate(answers):
            assert answer == expected[number], number
        await asyncio.to_thread(
            processes.wait_until, lambda: len(processes.healthy_workers(url)) == 2, "it is back"
        )
        # Trial requests may fail on a busy machine: the router then readmits the worker later.
        deadline = time.monotonic() + processes.EVENT_TIMEOUT_S
        while len(await served_by(http, url)) < 2:
            assert time.monotonic() < deadline, "the worker gets no requests"
    return max(stream.longest_gap_s for stream in streams)


def test_its_requests_are_answered_by_the_other_worker_to_the_last_byte(
    mortal_server: processes.Running,
) -> None:
    """The router's limits are minutes: only the worker's report on its scheduler can help."""
    gap = asyncio.run(freeze_in_the_middle(mortal_server.url))
    print(f"longest gap of a stream: {gap:.2f} s")
    assert gap <= LONGEST_GAP_S
