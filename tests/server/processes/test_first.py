"""The life of a worker, from its flags to its exit status, with real processes and signals."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.server.processes.first import ipc_directory
from support import fake_worker as fake_worker_module
from support.client import sse_events
from support.fake_worker import FakeWorker, fake_worker, script
from support.processes import ROOT, free_ports, post_json, status_of, wait_until
from support.procfs import Pid, ignored_signals

GENERATE = {"text": "a", "sampling_params": {"max_new_tokens": 500}}


def run_worker(*flags: str) -> subprocess.CompletedProcess[str]:
    """Runs the command of a user, for starts that fail."""
    return subprocess.run(
        [sys.executable, "-m", "mla_router.worker", *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=False,
    )


def exit_status(worker: FakeWorker) -> int:
    return worker.running.process.wait()


def started(worker: FakeWorker) -> tuple[Pid, Path]:
    """Returns the process and the ipc directory of the scheduler."""
    wait_until(lambda: worker.received("Start"), "the scheduler runs")
    ((number, directory),) = worker.received("Start")
    (scheduler,) = [pid for pid in worker.running.tree() if pid.number == number]
    return scheduler, Path(directory)


async def open_both(worker: FakeWorker, salt: str) -> tuple[Any, Any, aiohttp.ClientSession]:
    """A running stream, and a request that waits for its complete answer."""
    http = aiohttp.ClientSession(base_url=worker.url)
    body = GENERATE | {"cache_salt": salt}
    whole = asyncio.create_task(http.post("/generate", json=body))
    stream = await http.post("/generate", json=body | {"stream": True})
    events = sse_events(stream)
    await anext(events)
    while len(worker.received("Generate")) < 2:
        await asyncio.sleep(0.01)
    return whole, events, http


def test_a_long_path_of_temporary_files_leaves_room_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    for parent in (folder, Path("/tmp")):
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        with ipc_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "to_server_999"))
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert not directory.exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model-path=/nowhere"], "--model-path"),
        (["--tp-size=2", "--ep-size=4"], "--ep-size"),
        (["--max-queued-requests=-1"], "--max-queued-requests"),
    ],
)
def test_bad_flags(flags: list[str], says: str) -> None:
    end = run_worker(*flags)
    assert end.returncode == 2
    assert end.stdout == ""
    (line,) = end.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        end = run_worker(f"--port={taken.getsockname()[1]}")
    assert end.returncode == 1
    (line,) = end.stderr.splitlines()
    assert f"--port {taken.getsockname()[1] if taken.fileno() >= 0 else ''}".strip() in line
    assert "in use" in line


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_folder_without_a_tokenizer(tmp_path: Path, servers: int) -> None:
    shutil.copy(SMALL_MODEL / "config.json", tmp_path)
    flags = {"model_path": tmp_path, "tokenizer_worker_num": servers}
    with fake_worker(ready_path=None, **flags) as worker:
        assert exit_status(worker) == 2
        assert "tokenizer" in worker.running.output()
        assert "Traceback" not in worker.running.output()


def test_the_start() -> None:
    with fake_worker(ready_path=None) as worker:
        statuses = set()

        def ready() -> bool:
            statuses.add(status := status_of(worker.url + "/health"))
            return status == 200

        wait_until(ready, "/health says 200")
        assert statuses <= {0, 200, 503}
        (line,) = worker.running.output().splitlines()
        for part in (
            worker.url,
            "mla-small",
            "cpu",
            "float32",
            "4096",
            "pages of 16",
            "overlap on",
        ):
            assert part in line
        _, directory = started(worker)
        assert directory.name.startswith("mla-router-")
        assert not directory.exists(), "the sockets' names are still there"
        assert "mla_router server" in Path(f"/proc/{worker.running.pid}/cmdline").read_text()


def test_the_sockets_are_for_this_user_alone(tmp_path: Path) -> None:
    """The scheduler never becomes ready."""
    mode = "import os, sys; print(oct(os.stat(sys.argv[-1]).st_mode), flush=True)"
    entry = (
        "import sys; from mla_router.worker.__main__ import main; "
        f"sys.exit(main(['--port=0'], [sys.executable, '-c', {mode!r}]))"
    )
    end = subprocess.run(
        [sys.executable, "-c", entry],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert end.stdout.strip() == oct(stat.S_IFDIR | 0o700)
    assert end.returncode == 3, "a scheduler that ends before it is ready is a dead scheduler"
    assert list(tmp_path.iterdir()) == []


def test_until_it_is_ready_it_says_so() -> None:
    (port,) = free_ports(1)
    wait = "import time; time.sleep(600)"
    entry = (
        "import sys; from mla_router.worker.__main__ import main; "
        f"sys.exit(main(['--port={port}'], [sys.executable, '-c', {wait!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", entry], env=os.environ | {"PYTHONPATH": str(ROOT / "python")}
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: status_of(url + "/health") == 503, "/health says 503")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url + "/health")
        assert json.load(caught.value) == {"status": "starting"}
        with pytest.raises(urllib.error.HTTPError) as refused:
            post_json(url + "/generate", GENERATE)
        assert refused.value.code == 503
        assert refused.value.headers["Retry-After"]
    finally:
        process.terminate()
        assert process.wait() == 0


def test_the_schedulers_death() -> None:
    async def run(worker: FakeWorker) -> tuple[int, Any, list[str]]:
        whole, events, http = await open_both(worker, script(hold_after=1))
        async with http:
            os.kill(started(worker)[0].number, signal.SIGKILL)
            response = await whole
            return response.status, await response.json(), [event async for event in events]

    with fake_worker() as worker:
        status, body, events = asyncio.run(run(worker))
        assert status == 503, "the router may ask another worker"
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == "engine_died"
        assert json.loads(events[-1]) == body, "a broken stream must not look complete"
        assert "[DONE]" not in events
        assert exit_status(worker) == 3


def test_sigterm_lets_requests_finish() -> None:
    async def run(worker: FakeWorker) -> tuple[int, list[str], int, str]:
        async with aiohttp.ClientSession(base_url=worker.url) as http:
            body = GENERATE | {"stream": True, "rid": "long", "cache_salt": script(hold_after=1)}
            response = await http.post("/generate", json=body)
            events = sse_events(response)
            await anext(events)
            worker.running.process.terminate()
            while status_of(worker.url + "/health") != 503:
                await asyncio.sleep(0.01)
            async with http.post("/generate", json=GENERATE) as late:
                status, retry = late.status, late.headers["Retry-After"]
            async with http.post("/abort_request", json={"rid": "long"}) as end:
                assert end.status == 200
            return status, [event async for event in events], exit_status(worker), retry

    with fake_worker() as worker:
        status, events, code, retry = asyncio.run(run(worker))
        assert (status, retry) == (503, "1")
        assert events[-1] == "[DONE]"
        assert code == 0


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGINT], pytest.param([signal.SIGTERM, signal.SIGTERM], marks=pytest.mark.slow)],
)
def test_stopping_at_once(signals: list[signal.Signals]) -> None:
    async def run(worker: FakeWorker) -> tuple[int, list[str]]:
        whole, events, http = await open_both(worker, script(hold_after=1))
        async with http:
            for number in signals[:-1]:
                worker.running.process.send_signal(number)
                while status_of(worker.url + "/health") != 503:
                    await asyncio.sleep(0.01)
            worker.running.process.send_signal(signals[-1])
            response = await whole  # the request does not end by itself
            return response.status, [event async for event in events]

    with fake_worker() as worker:
        scheduler, _ = started(worker)
        status, events = asyncio.run(run(worker))
        assert status == 503
        assert json.loads(events[-1])["error"]["code"] == "engine_died", "another can go on"
        assert exit_status(worker) == 0
        assert not scheduler.alive
        assert "Traceback" not in worker.running.output()


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stop_before_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    silent = tmp_path / "silent_scheduler.py"
    silent.write_text(
        f"import sys; sys.path.insert(0, {str(fake_worker_module.FAKE_SCHEDULER.parent)!r})\n"
        "import fake_scheduler\n"
        "fake_scheduler.FakeScheduler.stats = lambda *_: None\n"
        "fake_scheduler.main()\n"
    )
    monkeypatch.setattr(fake_worker_module, "FAKE_SCHEDULER", silent)
    with fake_worker(ready_path=None, tokenizer_worker_num=servers) as worker:
        worker.wait_for(lambda worker: len(worker.received("GetStats")) == servers, "questions")
        worker.running.process.terminate()
        assert exit_status(worker) == 0
        assert "ERROR" not in worker.running.output()


def test_a_stop_while_the_tokenizer_hangs(tmp_path: Path) -> None:
    endless = "{% for one in range(99999) %}" * 3 + "{% endfor %}" * 3
    template = tmp_path / "endless.jinja"
    template.write_text(endless)
    with fake_worker(ready_path=None, chat_template=str(template)) as worker:
        wait_until(lambda: status_of(worker.url + "/health") == 503, "it listens")
        worker.running.process.terminate()
        assert exit_status(worker) == 0
        assert "Traceback" not in worker.running.output()


def test_nohup() -> None:
    with fake_worker(prefix=["nohup"]) as worker:
        assert signal.SIGHUP in ignored_signals(worker.running.pid)


def test_a_killed_server_leaves_no_scheduler() -> None:
    with fake_worker() as worker:
        scheduler, directory = started(worker)
        worker.running.process.kill()
        wait_until(lambda: not scheduler.alive, "the scheduler is gone")
        assert not directory.exists()


def test_prompts_that_would_wait_too_long() -> None:
    """The heartbeat reports 2 s a token, and no prompt is computed. With two tokens a prompt and a limit of 9 s, the
    fourth prompt would wait for 12 s."""

    async def run(worker: FakeWorker) -> None:
        async with aiohttp.ClientSession(base_url=worker.url) as http:
            begun = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
            begun["cache_salt"] = script(token_s=2.0)
            async with http.post("/generate", json=begun) as answer:
                assert answer.status == 200
            held = begun | {"cache_salt": script(hold_after=0)}
            asking = []
            for number in range(3):
                asking.append(asyncio.create_task(http.post("/generate", json=held)))
                while len(worker.received("Generate")) < number + 2:
                    await asyncio.sleep(0.01)
            async with http.post("/generate", json=held) as refused:
                assert refused.status == 429
                assert refused.headers["Retry-After"] == "3"
                assert (await refused.json())["error"]["code"] == "queue_slow"
            for task in asking:
                task.cancel()
            while len(worker.received("Abort")) < 3:
                await asyncio.sleep(0.01)
            async with http.post("/generate", json=begun) as answer:
                assert answer.status == 200

    with fake_worker(max_queued_seconds=9) as worker:
        asyncio.run(run(worker))


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_more_requests_than_places(servers: int) -> None:
    """The fake scheduler runs 128 requests. With a queue of 2, the 131st request is refused by any process."""

    async def run(worker: FakeWorker) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(base_url=worker.url, connector=connector) as http:
            body = GENERATE | {"cache_salt": script(hold_after=1)}
            asking = [asyncio.create_task(http.post("/generate", json=body)) for _ in range(130)]
            while len(worker.received("Generate")) < 130:
                await asyncio.sleep(0.01)
            async with http.post("/generate", json=body) as refused:
                assert refused.status == 429
                assert refused.headers["Retry-After"] == "1"
                assert (await refused.json())["error"]["type"] == "rate_limit_error"
            asking.pop().cancel()
            while len(worker.received("Abort")) < 1:
                await asyncio.sleep(0.01)
            short = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
            async with http.post("/generate", json=short) as accepted:
                assert accepted.status == 200
            for task in asking:
                task.cancel()

    with fake_worker(max_queued_requests=2, tokenizer_worker_num=servers) as worker:
        asyncio.run(run(worker))
