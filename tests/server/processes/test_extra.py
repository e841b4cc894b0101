"""A worker with several API processes behaves like a worker with one.

The kernel chooses the process of a connection at random. So each test opens many connections, and reads from the fake
scheduler which processes have sent requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mla_router.worker.heartbeat_watch import STUCK_FACTOR
from support.client import sse_events
from support.fake_worker import FakeWorker, fake_worker, script
from support.processes import get_json, post_json, status_of, wait_until

SERVERS = 2
STREAMS = 14  # a process gets none of them once in 8,000 runs: then more are opened
HOLD = {
    "text": "a",
    "sampling_params": {"max_new_tokens": 500},
    "cache_salt": script(hold_after=1),
    "stream": True,
}


@pytest.fixture(scope="module")
def several() -> Iterator[FakeWorker]:
    with fake_worker(tokenizer_worker_num=SERVERS) as worker:
        yield worker


def session(worker: FakeWorker) -> aiohttp.ClientSession:
    """Sends each request on a new connection."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(base_url=worker.url, connector=connector)


def metrics(url: str) -> dict[str, float]:
    """Returns the samples without labels besides the model's name."""
    with urllib.request.urlopen(url + "/metrics") as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: sample.value for sample in samples if len(sample.labels) == 1}


@asynccontextmanager
async def open_streams(worker: FakeWorker) -> AsyncIterator[dict[str, AsyncIterator[str]]]:
    """Opens endless streams, some on each API process. Yields them by name."""
    before = len(worker.generates())
    streams: dict[str, AsyncIterator[str]] = {}
    async with session(worker) as http:
        servers: set[int] = set()
        while len(servers) < SERVERS:
            for _ in range(STREAMS):
                name = f"s{len(streams)}"
                response = await http.post("/generate", json=HOLD | {"rid": name})
                assert response.status == 200, await response.text()
                streams[name] = sse_events(response)
                await anext(streams[name])
            servers = {generate.server for generate in worker.generates()[before:]}
        yield streams


def extra_pid(worker: FakeWorker, number: int) -> int:
    """Returns the process id of the API process with this number."""
    (found,) = [
        child.number
        for child in worker.running.tree()
        if Path(f"/proc/{child.number}/cmdline").read_text().rstrip(" \0").endswith(f" {number}")
    ]
    return found


async def last_of(events: AsyncIterator[str]) -> str:
    """Returns the last event of a running stream."""
    *_, last = [event async for event in events]
    return last


def test_the_start(several: FakeWorker) -> None:
    assert several.running.output().count(" ready: ") == 1
    assert f"{SERVERS} server processes" in several.running.output()
    ((_, directory),) = several.received("Start")
    assert not Path(directory).exists(), "the sockets' names are still there"
    for _ in range(10):
        assert status_of(several.url + "/health") == 200
    infos = [get_json(several.url + "/get_server_info") for _ in range(20)]
    assert len({info["boot_id"] for info in infos}) == 1
    assert {info["tokenizer_worker_num"] for info in infos} == {SERVERS}
    created = {get_json(several.url + "/v1/models")["data"][0]["created"] for _ in range(10)}
    assert len(created) == 1


def test_all_serve_and_the_metrics_add_up(several: FakeWorker) -> None:
    before, received = metrics(several.url), len(several.generates())
    prompts = [f"number {i}" for i in range(3 * STREAMS)]

    async def ask() -> list[dict[str, Any]]:
        async with session(several) as http:

            async def one(prompt: str) -> dict[str, Any]:
                body = {"text": prompt, "sampling_params": {"max_new_tokens": 4}}
                async with http.post("/generate", json=body) as response:
                    answer: dict[str, Any] = await response.json()
                    return answer

            return await asyncio.gather(*map(one, prompts))

    answers = asyncio.run(ask())
    # The fake scheduler repeats the prompt.
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = post_json(several.url + "/tokenize", {"prompt": prompt})["tokens"]
        assert answer["output_ids"] == (tokens * 4)[:4]
    served = Counter(generate.server for generate in several.generates()[received:])
    assert set(served) == set(range(SERVERS))
    assert served.total() == len(prompts)
    assert len({answer["meta_info"]["id"] for answer in answers}) == len(prompts)

    for _ in range(6):  # any process may answer
        now = metrics(several.url)
        for name in (
            "sglang:num_requests_total",
            "sglang:e2e_request_latency_seconds_count",
            "sglang:time_to_first_token_seconds_count",
            "sglang:queue_time_seconds_count",
        ):
            assert now[name] - before[name] == len(prompts), name
        assert now["sglang:generation_tokens_histogram_sum"] - before[
            "sglang:generation_tokens_histogram_sum"
        ] == 4 * len(prompts)
    wait_until(  # a gauge has the scheduler's value and is not summed over processes
        lambda: {metrics(several.url)["sglang:num_running_reqs"] for _ in range(6)} == {0.0},
        "nothing runs",
    )


def test_abort_through_any_process(several: FakeWorker) -> None:
    async def run() -> None:
        async with open_streams(several) as streams, session(several) as http:
            assert metrics(several.url)["sglang:num_running_reqs"] <= len(streams)
            for name, events in streams.items():
                for expected in (1, 0):
                    async with http.post("/abort_request", json={"rid": name}) as response:
                        assert await response.json() == {"aborted": expected}
                last = [event async for event in events]
                assert json.loads(last[-2])["meta_info"]["finish_reason"]["type"] == "abort"
                assert last[-1] == "[DONE]"

    asyncio.run(run())


@pytest.mark.parametrize("named", [{}, {"rid": "mine"}, {"request_id": "mine"}])
def test_an_answers_id_is_found_everywhere(several: FakeWorker, named: dict[str, str]) -> None:
    async def run() -> None:
        async with session(several) as http:
            for _ in range(8):
                body = {"model": "mla-small", "prompt": "a", "max_tokens": 500, "stream": True}
                salt = {"cache_salt": script(hold_after=1)}
                response = await http.post("/v1/completions", json=body | salt | named)
                events = sse_events(response)
                name = json.loads(await anext(events))["id"]
                async with http.post("/abort_request", json={"rid": name}) as end:
                    assert await end.json() == {"aborted": 1}
                assert await last_of(events) == "[DONE]"

    asyncio.run(run())


def test_abort_all_in_all_processes(several: FakeWorker) -> None:
    async def run() -> None:
        async with open_streams(several) as streams, session(several) as http:
            async with http.post("/abort_request", json={"abort_all": True}) as response:
                assert await response.json() == {"aborted": len(streams)}
            for events in streams.values():
                assert await last_of(events) == "[DONE]"

    asyncio.run(run())


def test_a_name_is_used_once_in_all(several: FakeWorker) -> None:
    async def run() -> None:
        async with session(several) as http:
            first = await http.post("/generate", json=HOLD | {"rid": "one"})
            await anext(sse_events(first))
            for _ in range(10):
                async with http.post("/generate", json=HOLD | {"rid": "one"}) as refused:
                    assert refused.status == 400
                    assert (await refused.json())["error"]["param"] == "rid"
            async with http.post("/abort_request", json={"rid": "one"}) as end:
                assert await end.json() == {"aborted": 1}
            # Of simultaneous requests at most one succeeds.
            asking = [http.post("/generate", json=HOLD | {"rid": "many"}) for _ in range(12)]
            responses = await asyncio.gather(*asking)
            statuses = Counter(response.status for response in responses)
            assert set(statuses) <= {200, 400}
            assert statuses[200] <= 1
            for response in responses:
                response.close()

    asyncio.run(run())


def test_the_death_of_one_process_ends_the_worker() -> None:
    async def run(worker: FakeWorker) -> None:
        async with open_streams(worker) as streams:
            os.kill(extra_pid(worker, 1), signal.SIGKILL)
            ends = await asyncio.gather(*map(last_of, streams.values()), return_exceptions=True)
            lost = [end for end in ends if isinstance(end, aiohttp.ClientError)]
            assert len(lost) == Counter(g.server for g in worker.generates())[1]
            told = [json.loads(end)["error"]["code"] for end in ends if isinstance(end, str)]
            assert told == ["engine_died"] * (len(ends) - len(lost))

    with fake_worker(tokenizer_worker_num=SERVERS) as worker:
        asyncio.run(run(worker))
        assert worker.running.process.wait() == 3
        wait_until(lambda: not worker.running.survivors(), "all are gone")
        assert "server process 1 has ended with status -9" in worker.running.output()
        assert "Traceback" not in worker.running.output()
        port = int(worker.url.rpartition(":")[2])
        # A supervisor does the same, while connections of the dead worker are in TIME_WAIT.
        with fake_worker(tokenizer_worker_num=SERVERS, port=port) as again:
            assert post_json(again.url + "/abort_request", {"rid": "s0"}) == {"aborted": 0}


def test_a_frozen_process_is_not_healthy() -> None:
    """Its heartbeat shows it, long before the watchdog."""
    with fake_worker(tokenizer_worker_num=SERVERS, watchdog_timeout=3600) as worker:
        frozen = extra_pid(worker, 1)
        os.kill(frozen, signal.SIGSTOP)
        # Any process may answer, except the frozen one.
        for _ in range(3):
            wait_until(lambda: status_of(worker.url + "/health", 0.5) == 503, "it says 503")
        os.kill(frozen, signal.SIGCONT)
        wait_until(lambda: status_of(worker.url + "/health") == 200, "it says 200")


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0, "the first server process"),
        pytest.param(1, "server process 1", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_stays_frozen_is_ended(number: int, name: str) -> None:
    """The launcher then starts the worker again."""
    with fake_worker(tokenizer_worker_num=SERVERS, watchdog_timeout=1) as worker:
        frozen = extra_pid(worker, number) if number else worker.running.pid
        os.kill(frozen, signal.SIGSTOP)
        worker.running.process.wait()
        wait_until(lambda: not worker.running.survivors(), "all are gone")
        assert f"{name} has been stuck for 4 seconds, and is ended" in worker.running.output()
        assert "the scheduler has been stuck" not in worker.running.output()


@pytest.mark.slow
def test_a_worker_that_was_paused_as_a_whole_continues() -> None:
    """As by `docker pause`: all heartbeats are old at its end."""
    with fake_worker(tokenizer_worker_num=SERVERS, watchdog_timeout=1) as worker:
        os.killpg(worker.running.pid, signal.SIGSTOP)
        time.sleep(STUCK_FACTOR + 1)
        os.killpg(worker.running.pid, signal.SIGCONT)
        time.sleep(2)  # two checks of the watchdog
        wait_until(lambda: status_of(worker.url + "/health") == 200, "it says 200")
        assert "stuck" not in worker.running.output()


def test_a_killed_first_server_leaves_nothing() -> None:
    with fake_worker(tokenizer_worker_num=SERVERS) as worker:
        assert len(worker.running.tree()) == SERVERS  # the scheduler, and the others
        worker.running.process.kill()
        wait_until(lambda: not worker.running.survivors(), "all are gone")
        assert status_of(worker.url + "/health") == 0


def test_a_closed_terminal_drains_all() -> None:
    """The kernel and the shell send SIGHUP to the whole group, each for itself."""

    async def run(worker: FakeWorker) -> None:
        async with open_streams(worker) as streams, session(worker) as http:
            os.killpg(worker.running.pid, signal.SIGHUP)
            while status_of(worker.url + "/health") != 503:
                await asyncio.sleep(0.01)
            os.killpg(worker.running.pid, signal.SIGHUP)

            async def refuses() -> bool:
                async with http.post("/generate", json=HOLD) as late:
                    if late.status == 200:
                        late.close()
                    return late.status == 503

            in_a_row = 0
            while in_a_row < 20:
                in_a_row = in_a_row + 1 if await refuses() else 0
            assert worker.running.process.poll() is None
            *others, last = streams
            for name in others:
                async with http.post("/abort_request", json={"rid": name}) as end:
                    assert await end.json() == {"aborted": 1}
            # With its last request the worker ends, perhaps before it has said so.
            with contextlib.suppress(aiohttp.ServerDisconnectedError):
                async with http.post("/abort_request", json={"rid": last}) as end:
                    assert await end.json() == {"aborted": 1}
            for events in streams.values():
                assert await last_of(events) == "[DONE]"

    with fake_worker(tokenizer_worker_num=SERVERS) as worker:
        asyncio.run(run(worker))
        assert worker.running.process.wait() == 0
        assert not worker.running.survivors()
        assert "Traceback" not in worker.running.output()


@pytest.mark.slow
def test_ctrl_c_stops_all() -> None:
    async def run(worker: FakeWorker) -> None:
        async with open_streams(worker) as streams:
            os.killpg(worker.running.pid, signal.SIGINT)  # a terminal sends it to the whole group
            for events in streams.values():
                assert json.loads(await last_of(events))["error"]["code"] == "engine_died"

    with fake_worker(tokenizer_worker_num=SERVERS) as worker:
        asyncio.run(run(worker))
        assert worker.running.process.wait() == 0
        assert not worker.running.survivors()
        assert "Traceback" not in worker.running.output()


def test_port_0_and_a_key() -> None:
    """All listen on the port that the first one got, and know the key, which no command line shows."""
    with fake_worker(None, port=0, api_key="s3cret", tokenizer_worker_num=SERVERS) as worker:
        wait_until(lambda: " ready: " in worker.running.output(), "it is ready")
        port = int(
            worker.running.output().partition("ready: http://127.0.0.1:")[2].partition(",")[0]
        )
        url = f"http://127.0.0.1:{port}"
        assert {status_of(url + "/v1/models") for _ in range(20)} == {401}
        request = urllib.request.Request(
            url + "/v1/models", headers={"Authorization": "Bearer s3cret"}
        )
        for _ in range(20):
            with urllib.request.urlopen(request) as response:
                assert response.headers["x-mla-worker"] == f"127.0.0.1:{port}"
        for child in worker.running.tree():
            assert "s3cret" not in Path(f"/proc/{child.number}/cmdline").read_text()


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_taken_port(shared: bool) -> None:
    """Also one that its owner would share."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with fake_worker(None, port=port, tokenizer_worker_num=SERVERS) as worker:
            assert worker.running.process.wait() == 1
            (line,) = worker.running.output().splitlines()
            assert f"--port {port}" in line
            assert "in use" in line
