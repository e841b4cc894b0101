"""`Router` in a Python program: its lifecycle, its workers, and threads around it."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from mla_router import Router, RouterConfig, RouterError
from mla_router._router import router_flags
from support.processes import (
    EVENT_TIMEOUT_S,
    LONG_ROUTER_TIMEOUTS,
    ROOT,
    get_json,
    post_json,
    status_of,
    wait_until,
)
from support.tiny_worker import TinyWorker, tiny_worker


@pytest.fixture
def worker() -> Iterator[TinyWorker]:
    with tiny_worker() as worker:
        yield worker


def config(*workers: TinyWorker, **settings: Any) -> RouterConfig:
    urls = [worker.url for worker in workers]
    common: dict[str, Any] = {"port": 0, "health_check_interval_secs": 0.05, "log_level": "warn"}
    return RouterConfig(worker_urls=urls, **common, **LONG_ROUTER_TIMEOUTS, **settings)


def until_healthy(router: Router, count: int) -> None:
    def enough() -> bool:
        return sum(worker["healthy"] for worker in router.workers()) == count

    wait_until(enough, f"{count} healthy workers")


def complete(router: Router, prompt: str = "Hi") -> str:
    answer = post_json(f"{router.url}/v1/completions", {"model": "m", "prompt": prompt})
    return str(answer["from"])


def test_requests_are_forwarded_unchanged(worker: TinyWorker) -> None:
    with Router(config(worker)) as router:
        until_healthy(router, 1)
        body = '{ "model":"m",\n"prompt": "\\u00e4ß" , "x":[1.0]}'.encode()
        request = urllib.request.Request(f"{router.url}/v1/completions", body)
        with urllib.request.urlopen(request) as response:
            assert json.load(response) == {"choices": [], "from": worker.url}
        assert worker.bodies == [body]


def test_workers_come_and_go(worker: TinyWorker) -> None:
    with tiny_worker() as second, Router(config(worker, policy="round_robin")) as router:
        router.add_worker(second.url)
        until_healthy(router, 2)
        listed = router.workers()
        assert [view["url"] for view in listed] == [worker.url, second.url]
        assert {"phase": "healthy", "requests": 0, "boot_id": "first"}.items() <= listed[1].items()
        assert {complete(router) for _ in range(4)} == {worker.url, second.url}

        router.remove_worker(worker.url)
        assert [view["url"] for view in router.workers()] == [second.url]
        assert {complete(router) for _ in range(4)} == {second.url}
        with pytest.raises(RouterError, match="registered"):
            router.remove_worker(worker.url)
        with pytest.raises(RouterError, match="already registered"):
            router.add_worker(second.url)
        with pytest.raises(ValueError, match="http://"):
            router.add_worker("127.0.0.1:1")


def test_stats_say_it_all_in_one_call(worker: TinyWorker) -> None:
    with Router(config(worker)) as router:
        until_healthy(router, 1)
        for _ in range(3):
            complete(router, "shared words " * 50)
        stats = router.stats()
        assert stats["requests"]["answered"]["2xx"] == 3
        assert stats["first_byte"]["count"] == stats["first_byte"]["buckets"][-1][1] == 3
        assert stats["tree"]["blocks"] > 0 and stats["process"]["resident_bytes"] > 1 << 20
        assert [view["url"] for view in stats["workers"]] == [worker.url]
        assert sum(stats["workers"][0]["selections"].values()) == 3
        assert stats["workers"][0]["tree_blocks"] == stats["tree"]["held"]


def test_the_stub_knows_every_field_of_the_returned_dicts(worker: TinyWorker) -> None:
    stub = ast.parse((ROOT / "python/mla_router/_router.pyi").read_text())
    types = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}

    def fields(name: str) -> set[str]:
        own = {ast.unparse(n.target) for n in types[name].body if isinstance(n, ast.AnnAssign)}
        bases = [ast.unparse(base) for base in types[name].bases]
        return own.union(*(fields(base) for base in bases if base in types))

    assert set(router_flags()[0]) == fields("_Flag")
    with Router(config(worker)) as router:
        stats = router.stats()
        assert set(router.workers()[0]) == fields("_Worker")
    assert set(stats) == fields("_Stats")
    assert set(stats["workers"][0]) == fields("_WorkerStats")
    assert set(stats["workers"][0]["engine"]) == fields("_EngineLoad")
    for part, name in {
        "requests": "_Requests",
        "tokens": "_Tokens",
        "first_byte": "_Latency",
        "tree": "_Tree",
        "process": "_Process",
    }.items():
        assert set(stats[part]) == fields(name)  # type: ignore[literal-required]


def test_a_prompt_returns_to_the_worker_that_knows_it() -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(tiny_worker()) for _ in range(3)]
        router = stack.enter_context(Router(config(*workers)))
        until_healthy(router, 3)
        homes = {}
        for group in range(12):
            prompt = f"group {group}: " + "shared words " * 50
            homes[group] = complete(router, prompt)
            assert {complete(router, f"{prompt} {turn}") for turn in range(3)} == {homes[group]}
        assert len(set(homes.values())) > 1


def test_two_routers_live_in_one_process(worker: TinyWorker) -> None:
    with Router(config(worker)) as first, Router(config(worker)) as second:
        until_healthy(first, 1)
        until_healthy(second, 1)
        assert first.url != second.url
        assert complete(first) == complete(second) == worker.url
        first.stop()
        assert complete(second) == worker.url


def test_a_taken_port_is_one_clear_line() -> None:
    with Router(config()) as first:
        port = int(first.url.rsplit(":", 1)[1])
        second = Router(RouterConfig(port=port))
        with pytest.raises(RouterError, match=f"127.0.0.1:{port}") as error:
            second.start()
        assert "\n" not in str(error.value)
        with pytest.raises(RouterError, match="not running"):
            _ = second.url


def test_start_and_stop_may_be_repeated() -> None:
    router = Router(config())
    router.stop()
    router.start()
    with pytest.raises(RouterError, match="already running"):
        router.start()
    url = router.url
    assert url in repr(router) and get_json(f"{url}/workers")["total"] == 0
    router.stop()
    router.stop()
    assert "not running" in repr(router) and status_of(f"{url}/liveness") == 0
    for use in (router.workers, router.wait, lambda: router.add_worker("http://a:1")):
        with pytest.raises(RouterError, match="not running"):
            use()
    router.start()
    assert status_of(f"{router.url}/liveness") == 200
    router.stop()


def test_a_forked_child_leaves_the_router_to_its_parent() -> None:
    program = """
import os, signal, sys, urllib.request
from mla_router import Router, RouterConfig, RouterError

with Router(RouterConfig(port=0, log_level="warn")) as router:
    url, parent = router.url, os.getpid()
    if os.fork() == 0:
        signal.alarm(20)
        try:
            router.wait()
        except RouterError as error:
            sys.exit(7 if f"in process {parent}" in str(error) else 8)  # stops at the end of the block
    status = os.waitstatus_to_exitcode(os.wait()[1])
    print(status, urllib.request.urlopen(f"{url}/liveness").status)
"""
    child = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert child.stdout == "7 200\n", child.stderr


def test_drain_waits_for_requests_in_flight(worker: TinyWorker) -> None:
    with Router(config(worker)) as router, ThreadPoolExecutor() as threads:
        until_healthy(router, 1)
        assert status_of(f"{router.url}/readiness") == 200
        worker.may_answer.clear()
        answer = threads.submit(complete, router)
        assert worker.asked.wait(EVENT_TIMEOUT_S)

        assert router.drain(0.0) is False
        assert status_of(f"{router.url}/readiness") == 503
        with pytest.raises(urllib.error.HTTPError, match="503"):
            complete(router)

        # A thread that waits in Rust releases the GIL, or no other thread could end its wait.
        drained = threads.submit(router.drain, 60.0)
        worker.may_answer.set()
        assert drained.result(EVENT_TIMEOUT_S) is True
        assert answer.result(EVENT_TIMEOUT_S) == worker.url


def test_an_event_loop_goes_on_while_the_router_waits(worker: TinyWorker) -> None:
    """A wait for the router blocks its own thread only."""

    async def ticks_during(blocking: Callable[[], Any], end: Callable[[], Any]) -> None:
        waiting = asyncio.create_task(asyncio.to_thread(blocking))
        for _ in range(200):
            await asyncio.sleep(0.001)
            assert not waiting.done()
        await asyncio.to_thread(end)
        await waiting

    async def program() -> None:
        router = Router(config(worker))
        await asyncio.to_thread(router.start)
        await asyncio.to_thread(until_healthy, router, 1)
        await ticks_during(router.wait, router.stop)

        await asyncio.to_thread(router.start)
        await asyncio.to_thread(until_healthy, router, 1)
        worker.may_answer.clear()
        answer = asyncio.create_task(asyncio.to_thread(complete, router))
        await asyncio.to_thread(worker.asked.wait)
        await ticks_during(lambda: router.drain(60.0), worker.may_answer.set)
        assert await answer == worker.url

        await asyncio.to_thread(router.stop)
        await asyncio.to_thread(router.start)
        await asyncio.to_thread(until_healthy, router, 1)
        worker.may_answer.clear()
        worker.asked.clear()
        answer = asyncio.create_task(asyncio.to_thread(complete, router))
        await asyncio.to_thread(worker.asked.wait)
        await ticks_during(lambda: router.stop(60.0), worker.may_answer.set)
        assert await answer == worker.url

    asyncio.run(program())


@contextmanager
def uninterrupted_turns() -> Iterator[None]:
    """A thread keeps the GIL until it waits: a thread that sets an event and then waits for the router starts its
    wait before the thread that waits for the event continues."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_stop_ends_wait_in_other_threads() -> None:
    router = Router(config())
    router.start()

    def wait(here: threading.Event) -> None:
        here.set()
        router.wait()

    with ThreadPoolExecutor() as threads, uninterrupted_turns():
        events = [threading.Event() for _ in range(3)]
        waits = [threads.submit(wait, here) for here in events]
        assert all(here.wait(EVENT_TIMEOUT_S) for here in events)
        router.stop()
        assert [wait.result(EVENT_TIMEOUT_S) for wait in waits] == [None] * 3


def test_stop_does_not_wait_longer_than_told(worker: TinyWorker) -> None:
    with Router(config(worker)) as router, ThreadPoolExecutor() as threads:
        until_healthy(router, 1)
        worker.may_answer.clear()
        answer = threads.submit(complete, router)
        assert worker.asked.wait(EVENT_TIMEOUT_S)
        router.stop(timeout_s=0.0)
        with pytest.raises(OSError):
            answer.result(EVENT_TIMEOUT_S)


def test_ctrl_c_ends_wait_but_not_the_router() -> None:
    waiting = threading.Event()

    def interrupt() -> None:
        waiting.wait()
        os.kill(os.getpid(), signal.SIGINT)

    with Router(config()) as router, ThreadPoolExecutor() as threads:
        interrupted = threads.submit(interrupt)
        with uninterrupted_turns(), pytest.raises(KeyboardInterrupt):
            waiting.set()
            router.wait()
        interrupted.result(EVENT_TIMEOUT_S)
        assert status_of(f"{router.url}/liveness") == 200


def test_an_exception_inside_with_stops_the_router() -> None:
    with pytest.raises(ZeroDivisionError), Router(config()) as router:
        url = router.url
        raise ZeroDivisionError
    assert status_of(f"{url}/liveness") == 0


def test_a_forgotten_router_goes_away() -> None:
    router = Router(config())
    router.start()
    url = router.url
    del router
    assert status_of(f"{url}/liveness") == 0


def test_bad_times_are_value_errors() -> None:
    with Router(config()) as router:
        for bad in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="timeout_s must be a finite number of seconds"):
                router.drain(bad)
