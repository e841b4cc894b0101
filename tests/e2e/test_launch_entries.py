"""The public entry points: three commands and one Python class."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

from support import client, processes
from support.client import Answer
from support.pasted import curl_lines
from support.processes import Running


def generate_many(url: str, count: int) -> list[Answer]:
    """Sends requests without a common prefix, so that only the load decides the routing."""

    async def run() -> list[Answer]:
        async with client.session() as http:
            prompts = [[i, *range(20)] for i in range(count)]
            return await asyncio.gather(
                *(client.generate(http, url, prompt, 8) for prompt in prompts)
            )

    return asyncio.run(run())


def test_the_printed_curl_lines_work(small_server: Running) -> None:
    processes.wait_until(  # it follows shortly after the last worker is in rotation
        lambda: "Ctrl-C stops everything" in small_server.output(), "the closing lines"
    )
    commands = curl_lines(small_server.output())
    assert len(commands) == 2, small_server.output()
    answers = [
        subprocess.run(
            [*command, "--fail-with-body", "-sS"], check=False, capture_output=True, text=True
        )
        for command in commands
    ]
    for command, answer in zip(commands, answers, strict=True):
        assert answer.returncode == 0, (command, answer)
    streamed = [answer.stdout.rstrip().endswith("data: [DONE]") for answer in answers]
    assert any(streamed)
    assert not all(streamed)
    whole = answers[streamed.index(False)].stdout
    assert '"choices"' in whole


def test_launch_router_in_front_of_launch_workers(small_worker: str, other_worker: Running) -> None:
    with processes.router([small_worker, other_worker.url]) as router:
        processes.wait_until(
            lambda: len(processes.healthy_workers(router.url)) == 2, "both in rotation"
        )
        answers = generate_many(router.url, 16)
        assert {answer.status for answer in answers} == {200}
        assert len({answer.worker for answer in answers}) == 2


def test_launch_router_with_bytes_that_are_no_text() -> None:
    command = [sys.executable, "-m", "mla_router.launch_router", "--worker-urls", "\udcff"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "error: a flag has bytes that are not UTF-8\n"


def test_router_from_python(small_worker: str, other_worker: Running) -> None:
    from mla_router import Router, RouterConfig

    first, second = small_worker, other_worker.url
    (port,) = processes.free_ports(1)
    patient: Any = processes.LONG_ROUTER_TIMEOUTS
    router = Router(RouterConfig(port=port, worker_urls=[first], **patient))
    router.start()
    try:
        assert router.url == f"http://127.0.0.1:{port}"

        def in_rotation() -> set[str]:
            return {entry["url"] for entry in router.workers() if entry["healthy"]}

        processes.wait_until(lambda: in_rotation() == {first}, "the first worker")
        (name,) = {answer.worker for answer in generate_many(router.url, 8)}

        router.add_worker(second)
        processes.wait_until(lambda: in_rotation() == {first, second}, "the second worker")
        assert len({answer.worker for answer in generate_many(router.url, 16)}) == 2

        router.remove_worker(first)
        assert [entry["url"] for entry in router.workers()] == [second]
        (other,) = {answer.worker for answer in generate_many(router.url, 8)}
        assert other != name
    finally:
        router.stop()
    assert processes.status_of(f"http://127.0.0.1:{port}/health") == 0
