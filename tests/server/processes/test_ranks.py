"""The ranks of a worker share its fate. The scheduler and the other rank are fakes."""

from __future__ import annotations

import asyncio
import os
import signal

import aiohttp

from support.fake_worker import FakeWorker, fake_worker, script
from support.processes import status_of, wait_until
from support.procfs import Pid


def rank_of(worker: FakeWorker) -> Pid:
    (rank,) = [pid for pid in worker.running.tree() if "fake_rank.py" in pid.command]
    return rank


def test_a_stopped_rank_is_not_healthy_and_a_dead_one_ends_the_worker() -> None:
    async def answer(worker: FakeWorker, rank: Pid) -> tuple[int, dict[str, str]]:
        body = {"text": "a", "cache_salt": script(hold_after=1)}
        async with aiohttp.ClientSession(base_url=worker.url) as http:
            asked = asyncio.create_task(http.post("/generate", json=body))
            while not worker.received("Generate"):
                await asyncio.sleep(0.01)
            os.kill(rank.number, signal.SIGKILL)
            response = await asked
            return response.status, (await response.json())["error"]

    with fake_worker(tp_size=2) as worker:
        rank = rank_of(worker)
        os.kill(rank.number, signal.SIGSTOP)
        wait_until(lambda: status_of(worker.url + "/health") == 503, "the rank is stopped")
        os.kill(rank.number, signal.SIGCONT)
        wait_until(lambda: status_of(worker.url + "/health") == 200, "it continues")
        status, error = asyncio.run(answer(worker, rank))
        assert (status, error["code"]) == (503, "engine_died"), "the router may ask another worker"
        assert worker.running.process.wait() == 3
        assert "rank 1 has ended with status -9" in worker.running.output()
        wait_until(lambda: not worker.running.survivors(), "no process is left")


def test_a_stuck_rank_is_ended() -> None:
    with fake_worker(tp_size=2, watchdog_timeout=1) as worker:
        os.kill(rank_of(worker).number, signal.SIGSTOP)
        assert worker.running.process.wait() == 3
        assert "rank 1 has been stuck for 4 seconds, and is ended" in worker.running.output()
        wait_until(lambda: not worker.running.survivors(), "no process is left")
