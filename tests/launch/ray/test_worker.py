"""A worker on a scripted place, behind a list that records its calls. tests/e2e/test_ray.py has a real cluster."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from mla_router import RouterError
from mla_router.launch.output import Output
from mla_router.launch.supervisor import GaveUpError, RestartPolicy, Supervisor
from mla_router.worker.config import EXIT_BAD_SETTINGS, WorkerConfig

pytest.importorskip("ray", reason="needs Ray: requirements.lock has it")

from mla_router.launch.ray.cluster import LostError, StartError
from mla_router.launch.ray.worker import RayWorker

QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02)


class Place:
    """A place whose worker is in `script`: its events, an error to raise, or an asyncio.Event to wait for."""

    def __init__(self, script: list[Any]) -> None:
        self._script = script
        self._released = asyncio.Event()
        self.stopped = False

    async def run(self, config: WorkerConfig) -> AsyncIterator[dict[str, Any]]:
        assert config.worker_id == "worker-0"
        for step in self._script:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                yield step
        await self._released.wait()
        raise LostError("the actor was killed")

    async def stop(self, grace_s: float) -> None:
        assert grace_s == 1.0
        self.stopped = True

    @property
    def released(self) -> bool:
        return self._released.is_set()

    def release(self) -> None:
        self._released.set()


class WorkerList:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.changed = asyncio.Event()

    def add_worker(self, url: str) -> None:
        self._note("add", url)

    def remove_worker(self, url: str) -> None:
        self._note("remove", url)

    def _note(self, call: str, url: str) -> None:
        self.calls.append((call, url))
        self.changed.set()
        self.changed.clear()

    async def until(self, count: int) -> None:
        while len(self.calls) < count:
            await self.changed.wait()


class Fleet:
    """A supervisor of one worker, on `places` by turns."""

    def __init__(self, *scripts: list[Any], watchdog_s: float = 30.0) -> None:
        self.places = [Place(script) for script in scripts]
        self.used: list[Place] = []
        self.router = WorkerList()
        self.log = io.StringIO()
        output = Output(self.log)
        worker = RayWorker(
            WorkerConfig(worker_id="worker-0", watchdog_timeout=watchdog_s),
            self._place,
            self.router,
            lambda line: output.worker(0, line),
            lambda: output.launch("waits"),
        )
        self.supervisor = Supervisor([worker], output, QUICK)

    def _place(self) -> Place:
        self.used.append(self.places[len(self.used)])
        return self.used[-1]


async def healthy(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


def run(check: Callable[[list[Any]], Awaitable[None]], host: str = "127.0.0.1") -> None:
    """Runs `check` with the address of a server on `host` whose health is good."""

    async def serve() -> None:
        async with await asyncio.start_server(healthy, host, 0) as server:
            await check(list(server.sockets[0].getsockname()[:2]))

    asyncio.run(serve())


def test_a_lost_worker_leaves_the_rotation_and_gets_another_place() -> None:
    async def check(address: list[Any]) -> None:
        death = asyncio.Event()
        started = [{"address": address}, {"lines": ["one", "two"]}]
        fleet = Fleet([*started, death, LostError("its node has died")], started)
        fleet.supervisor.start()
        url = f"http://127.0.0.1:{address[1]}"
        await fleet.router.until(1)
        assert fleet.router.calls == [("add", url)]
        death.set()
        await fleet.router.until(3)
        assert fleet.router.calls[1:] == [("remove", url), ("add", url)]
        await fleet.supervisor.stop(1.0)
        assert [(place.released, place.stopped) for place in fleet.used] == [
            (True, False),
            (False, True),
        ]
        log = fleet.log.getvalue()
        assert log.count("[worker 0] one\n[worker 0] two\n") == 2
        assert "worker 0 was lost: its node has died; starting it again in 0.01 s" in log

    run(check)


def test_a_worker_that_does_not_answer_any_more_gets_another_place() -> None:
    async def check(address: list[Any]) -> None:
        asked: list[asyncio.StreamWriter] = []

        async def healthy_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(writer)
            if len(asked) == 1:
                await healthy(reader, writer)

        server = await asyncio.start_server(healthy_once, "127.0.0.1", 0)
        mute = list(server.sockets[0].getsockname())
        fleet = Fleet([{"address": mute}], [{"address": address}], watchdog_s=1.0)
        fleet.supervisor.start()
        await fleet.router.until(3)
        urls = [f"http://127.0.0.1:{port}" for _, port in (mute, address)]
        assert fleet.router.calls == [("add", urls[0]), ("remove", urls[0]), ("add", urls[1])]
        await fleet.supervisor.stop(1.0)
        for writer in asked:
            writer.close()
        server.close()
        assert "[worker 0] no answer for 4 seconds, and is killed" in fleet.log.getvalue()

    run(check)


def test_a_node_with_an_ipv6_address() -> None:
    async def check(address: list[Any]) -> None:
        fleet = Fleet([{"address": address}])
        fleet.supervisor.start()
        await fleet.router.until(1)
        assert fleet.router.calls == [("add", f"http://[::1]:{address[1]}")]
        await fleet.supervisor.stop(1.0)

    run(check, "::1")


def test_a_worker_that_an_operator_has_added_is_ready() -> None:
    async def check(address: list[Any]) -> None:
        fleet = Fleet([{"address": address}])
        fleet.router.add_worker = refuse  # type: ignore[method-assign]
        fleet.supervisor.start()
        await fleet.supervisor.all_ready()
        await fleet.supervisor.stop(1.0)

    def refuse(url: str) -> None:
        raise RouterError(f"worker {url} is already registered")

    run(check)


def test_losses_before_the_first_start_are_not_counted() -> None:
    async def check(address: list[Any]) -> None:
        losses = [[LostError("its node has died")]] * (2 * QUICK.attempts)
        fleet = Fleet(*losses, [{"address": address}])
        fleet.supervisor.start()
        await fleet.supervisor.all_ready()
        await fleet.supervisor.stop(1.0)

    run(check)


@pytest.mark.parametrize(
    ("end", "places", "message"),
    [
        ({"status": 1}, QUICK.attempts, "worker 0 exited with code 1 before it was ready, 3 times"),
        ({"status": EXIT_BAD_SETTINGS}, 1, "worker 0 exited with code 2 before it was ready; see"),
        (StartError("no port"), QUICK.attempts, "worker 0 cannot run on its node: no port before"),
    ],
)
def test_a_worker_that_never_serves_is_given_up(end: Any, places: int, message: str) -> None:
    async def check(_: list[Any]) -> None:
        fleet = Fleet(*[[{"address": ["127.0.0.1", 9]}, end]] * places)
        fleet.supervisor.start()
        with pytest.raises(GaveUpError, match=message):
            await fleet.supervisor.lost()
        assert len(fleet.used) == places
        assert all(place.released for place in fleet.used)
        assert fleet.router.calls == []

    run(check)


def test_a_worker_without_room_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_router.launch.ray.worker.PENDING_S", 0.01)

    async def check(_: list[Any]) -> None:
        fleet = Fleet([])
        fleet.supervisor.start()
        while "waits" not in fleet.log.getvalue():
            await asyncio.sleep(0.01)
        await fleet.supervisor.stop(1.0)

    run(check)
