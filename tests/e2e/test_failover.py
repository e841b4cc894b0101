"""Workers are killed and servers stopped under load, with the least effect on clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from support import client, processes
from support.client import Answer
from support.procfs import Pid, descendants, listener

CLIENTS = 6
# Between two requests of a client. Without it they would take the cores from a worker that starts again.
PAUSE_S = 2.0
HELD = 2


@contextlib.asynccontextmanager
async def load(url: str) -> AsyncIterator[list[Answer]]:
    """Sends requests without streaming, `CLIENTS` at a time, within the block. Yields their answers."""
    answers: list[Answer] = []
    stopping = asyncio.Event()
    rng = random.Random(1)

    async def ask(http: aiohttp.ClientSession) -> None:
        while not stopping.is_set():
            prompt = [rng.randrange(200) for _ in range(rng.randint(10, 80))]
            answers.append(await client.generate(http, url, prompt, 32))
            await asyncio.sleep(PAUSE_S)

    async with client.session() as http, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(ask(http))
        try:
            yield answers
        finally:
            stopping.set()


async def until_served_by(worker: str, answers: list[Answer], count: int) -> None:
    """Waits until `count` more requests have reached this worker."""
    start = len(answers)

    def landed() -> bool:
        return sum(answer.worker == worker for answer in answers[start:]) >= count

    await asyncio.to_thread(processes.wait_until, landed, f"{count} requests on {worker}")


@pytest.mark.parametrize(
    "victim", ["server process", pytest.param("scheduler process", marks=pytest.mark.slow)]
)
def test_kill_9_of_a_worker_loses_no_request(mortal_server: processes.Running, victim: str) -> None:
    server = mortal_server
    url = processes.workers(server.url)[0]["url"]
    port = int(url.rpartition(":")[2])
    before = processes.get_json(url + "/get_server_info")
    http_process = listener(port)
    (scheduler_process,) = [p.number for p in descendants(http_process) if "scheduler" in p.command]
    pid = http_process if victim == "server process" else scheduler_process

    def busy() -> bool:
        entries = processes.workers(server.url)
        return any(entry["url"] == url and entry["requests"] > 0 for entry in entries)

    async def kill_under_load() -> list[Answer]:
        async with load(server.url) as answers:
            await until_served_by(before["worker_id"], answers, CLIENTS)
            await asyncio.to_thread(processes.wait_until, busy, "requests on the victim")
            os.kill(pid, signal.SIGKILL)

            def restarted() -> bool:
                assert server.process.poll() is None, "the launcher is gone"
                with contextlib.suppress(OSError):
                    return bool(
                        processes.get_json(url + "/get_server_info")["boot_id"] != before["boot_id"]
                    )
                return False

            await asyncio.to_thread(processes.wait_until, restarted, f"{url} restarts")
            await until_served_by(before["worker_id"], answers, CLIENTS)
            return answers

    answers = asyncio.run(kill_under_load())
    failed = [answer for answer in answers if answer.status != 200]
    assert not failed, f"{len(failed)} of {len(answers)} failed, first: {failed[0]}"
    assert all(len(answer.tokens) == 32 for answer in answers)
    assert len(processes.healthy_workers(server.url)) == 2
    assert server.process.poll() is None


class Streams:
    """Streams completions of `tokens` tokens through the router. The first `CLIENTS` of them report their beginning."""

    def __init__(self, url: str, tokens: int) -> None:
        self.url, self.tokens = url, tokens
        self.began = [asyncio.Event() for _ in range(CLIENTS)]

    async def read(self, http: aiohttp.ClientSession, number: int) -> int:
        """Returns the tokens until `[DONE]`."""
        body = {
            "model": "mla-small",
            "prompt": f"Stream number {number} says",
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        received, finished = 0, False
        async with http.post(self.url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for event in client.sse_events(response):
                if number < CLIENTS:
                    self.began[number].set()
                if event == "[DONE]":
                    finished = True
                elif event:
                    usage = json.loads(event).get("usage")
                    received = usage["completion_tokens"] if usage else received
        assert finished, f"stream {number} broke off"
        return received

    async def all_began(self) -> None:
        await asyncio.gather(*(event.wait() for event in self.began))


@pytest.mark.slow
def test_ctrl_c_under_load_waits_for_no_stream_and_leaves_nothing() -> None:
    """tests/launch/test_server.py has Ctrl-C with other workers, and the time limit."""
    dp_size = 2
    with processes.server(dp_size=dp_size, router_shutdown_grace_period_secs=3600) as server:

        async def interrupt() -> list[int | BaseException]:
            streams = Streams(server.url, 5_000)
            async with client.session() as http:
                tasks = [asyncio.create_task(streams.read(http, i)) for i in range(CLIENTS)]
                await streams.all_began()
                server.tree()
                os.killpg(server.pid, signal.SIGINT)  # a terminal signals the whole group
                await asyncio.to_thread(server.process.wait)
                return await asyncio.gather(*tasks, return_exceptions=True)

        ends = asyncio.run(interrupt())
        assert all(isinstance(end, aiohttp.ClientError | AssertionError) for end in ends), ends
        assert len(server.seen) >= 2 * dp_size  # API processes and schedulers
        processes.wait_until(lambda: not server.survivors(), "no process is left")
        assert "Traceback" not in server.output()


@contextlib.contextmanager
def frozen(pids: list[Pid]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid.number, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid.number, signal.SIGCONT)


def begun_requests(workers: list[str]) -> int:
    """Returns the number of requests that the workers have received."""
    pages = [urllib.request.urlopen(url + "/metrics").read().decode() for url in workers]
    counts = re.findall(r"^sglang:num_requests_total{.*} (\d+)", "\n".join(pages), re.MULTILINE)
    assert len(counts) == len(workers)
    return sum(map(int, counts))


@pytest.mark.parametrize(
    ("number", "to_all", "dp_size"),
    [
        (signal.SIGTERM, True, 1),
        pytest.param(signal.SIGHUP, True, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, 2, marks=pytest.mark.slow),
    ],
)
def test_signals_let_running_streams_finish(
    number: signal.Signals, to_all: bool, dp_size: int
) -> None:
    """SIGTERM to every process, as from systemd, also drains, and so does SIGHUP. The schedulers are frozen, so that requests are running
    when the signal arrives."""
    # Silent workers during their shutdown are not dead.
    flags = {"router_shutdown_grace_period_secs": 600, "router_health_failure_threshold": 1000}
    with processes.server(dp_size=dp_size, **flags) as server:
        workers = [entry["url"] for entry in processes.workers(server.url)]
        others = server.tree()
        schedulers = [pid for pid in others if "scheduler" in pid.command]
        assert len(schedulers) == dp_size

        def refuses() -> bool:
            return processes.status_of(server.url + "/readiness") != 200

        def all_are_there() -> bool:
            return begun_requests(workers) == CLIENTS + HELD

        async def terminate() -> list[int]:
            streams = Streams(server.url, 40)

            def read(count: int, first: int) -> list[asyncio.Task[int]]:
                return [asyncio.create_task(streams.read(http, first + i)) for i in range(count)]

            async with client.session() as http:
                tasks = read(CLIENTS, 0)
                await streams.all_began()
                with frozen(schedulers):
                    held = read(HELD, CLIENTS)
                    await asyncio.to_thread(processes.wait_until, all_are_there, "all are there")
                    server.process.send_signal(number)
                    for pid in others if to_all else []:
                        os.kill(pid.number, number)
                    await asyncio.to_thread(processes.wait_until, refuses, "readiness is gone")
                    with contextlib.suppress(aiohttp.ClientConnectionError):
                        late = await client.generate(http, server.url, [1, 2, 3], 4)
                        assert late.status == 503, late
                    assert not any(task.done() for task in held)
                return await asyncio.gather(*tasks, *held)

        assert asyncio.run(terminate()) == [40] * (CLIENTS + HELD)
        assert server.process.wait() == 0
        processes.wait_until(lambda: not server.survivors(), "no process is left")
        assert "Traceback" not in server.output()
