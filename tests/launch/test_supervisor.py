"""A supervisor with fake workers, which files in a folder control (fake_worker.py)."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mla_router.launch.local_group import LocalGroup
from mla_router.launch.local_worker import LocalWorker
from mla_router.launch.output import Output
from mla_router.launch.supervisor import GaveUpError, RestartPolicy, Supervisor
from mla_router.worker.config import EXIT_BAD_SETTINGS, WorkerConfig
from support.processes import free_ports, wait_until
from support.procfs import descendants, listener

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02)


class Supervised:
    """A supervisor with `count` fake workers, and its output."""

    def __init__(
        self, folder: Path, count: int, *, is_group: bool = False, watchdog_s: float = 30.0
    ) -> None:
        """`is_group`: whether they are DP ranks of one group."""
        self.watchdog_s = watchdog_s
        self.folder = folder
        self.is_group = is_group
        self.ports = free_ports(count)
        self.log = io.StringIO()

    def run(
        self, check: Callable[[Supervisor], Awaitable[None]], policy: RestartPolicy = QUICK
    ) -> None:
        async def run() -> None:
            output = Output(self.log)
            started = [
                (
                    WorkerConfig(port=port, watchdog_timeout=self.watchdog_s),
                    self.command(port),
                    partial(output.worker, index),
                )
                for index, port in enumerate(self.ports)
            ]
            workers = [LocalWorker(*one) for one in started]
            group = [LocalGroup(started)]
            supervisor = Supervisor(group if self.is_group else workers, output, policy)
            supervisor.start()
            try:
                await check(supervisor)
            finally:
                await supervisor.stop(grace_s=5.0)

        asyncio.run(run())

    def command(self, port: int) -> list[str]:
        arguments = [str(port), str(self.folder), str(os.getpid())]
        return [sys.executable, "-u", str(FAKE_WORKER), *arguments]

    def starts(self) -> int:
        return len((self.folder / "starts").read_text().splitlines())

    def said(self, text: str) -> bool:
        return text in self.log.getvalue()


def test_the_delay_doubles_up_to_a_limit() -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=30.0)
    assert [policy.delay_s(failures) for failures in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_all_become_ready_and_their_lines_carry_their_names(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, 2)

    async def check(supervisor: Supervisor) -> None:
        await supervisor.all_ready()

    supervised.run(check)
    for index, port in enumerate(supervised.ports):
        assert supervised.said(f"[worker {index}] fake worker on port {port}\n")
        # With the time, as the router's own lines.
        line = rf"\[launch\] 20\S+T\S+Z  INFO worker {index} ready after "
        assert re.search(line, supervised.log.getvalue())
    assert supervised.starts() == 2


def test_a_killed_worker_restarts_on_its_port(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, 1)
    (port,) = supervised.ports

    async def check(supervisor: Supervisor) -> None:
        await supervisor.all_ready()
        first = listener(port)
        # A worker that was ready once is restarted without limit
        for _ in range(QUICK.attempts + 1):
            seen = supervised.log.getvalue().count("ready after")
            os.kill(listener(port), signal.SIGKILL)
            await asyncio.to_thread(
                wait_until,
                lambda seen=seen: supervised.log.getvalue().count("ready after") > seen,
                "ready again",
            )
        assert listener(port) != first

    supervised.run(check)
    assert supervised.said("worker 0 was ended by signal 9 (Killed); starting it again in ")


def test_a_worker_that_does_not_answer_any_more_is_replaced(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, 1, watchdog_s=1.0)
    (port,) = supervised.ports

    async def check(supervisor: Supervisor) -> None:
        await supervisor.all_ready()
        stopped = listener(port)
        os.kill(stopped, signal.SIGSTOP)
        await asyncio.to_thread(
            wait_until, lambda: supervised.log.getvalue().count("ready after") == 2, "ready again"
        )
        assert listener(port) != stopped

    supervised.run(check)
    assert supervised.said("[worker 0] no answer for 4 seconds, and is killed")


def test_dp_ranks_end_and_restart_together(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, 3, is_group=True)

    async def check(supervisor: Supervisor) -> None:
        await supervisor.all_ready()
        before = {listener(port) for port in supervised.ports}
        os.kill(listener(supervised.ports[1]), signal.SIGKILL)
        await asyncio.to_thread(
            wait_until, lambda: supervised.log.getvalue().count("ready after") == 2, "ready again"
        )
        assert not before & {listener(port) for port in supervised.ports}

    supervised.run(check)
    assert supervised.starts() == 6
    assert supervised.said(
        "worker 0 is a group whose DP rank 1 was ended by signal 9 (Killed); starting it again in "
    )


def test_the_delay_is_the_first_one_again_for_a_worker_that_was_well_for_some_time(
    tmp_path: Path,
) -> None:
    supervised = Supervised(tmp_path, 1)
    (port,) = supervised.ports

    async def check(supervisor: Supervisor) -> None:
        await supervisor.all_ready()
        for kills in range(1, 4):
            await asyncio.to_thread(
                wait_until,
                lambda kills=kills: supervised.log.getvalue().count("ready after") == kills,
                "ready",
            )
            await asyncio.sleep(0.1)  # longer than `proven_s`
            os.kill(listener(port), signal.SIGKILL)
        await asyncio.to_thread(
            wait_until,
            lambda: supervised.log.getvalue().count("starting it again") == 3,
            "started again",
        )

    supervised.run(check, RestartPolicy(first_delay_s=0.01, max_delay_s=1.0, proven_s=0.05))
    assert supervised.log.getvalue().count("starting it again in 0.01 s") == 3


def test_a_worker_that_never_becomes_ready_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "exit_code").write_text("1")
    supervised = Supervised(tmp_path, 1)

    async def check(supervisor: Supervisor) -> None:
        with pytest.raises(GaveUpError, match="exited with code 1 before it was ready, 3 times"):
            await supervisor.lost()

    supervised.run(check)
    assert supervised.starts() == QUICK.attempts
    assert supervised.said("[worker 0] cannot work like this")


def test_a_usage_error_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "exit_code").write_text(str(EXIT_BAD_SETTINGS))
    supervised = Supervised(tmp_path, 1)

    async def check(supervisor: Supervisor) -> None:
        with pytest.raises(GaveUpError, match="exited with code 2 before it was ready"):
            await supervisor.lost()

    supervised.run(check)
    assert supervised.starts() == 1


def test_a_command_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    async def run() -> None:
        missing = str(tmp_path / "missing")
        worker = LocalWorker(WorkerConfig(), [missing], print)
        supervisor = Supervisor([worker], Output(io.StringIO()), QUICK)
        supervisor.start()
        with pytest.raises(GaveUpError, match=r"not start \(No such file or directory\)"):
            await supervisor.lost()
        await supervisor.stop(grace_s=1.0)

    asyncio.run(run())


@pytest.mark.parametrize("is_group", [False, True])
def test_a_restart_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_group: bool
) -> None:
    """There may be too many processes for a moment. The other workers serve."""
    supervised = Supervised(tmp_path, 2, is_group=is_group)
    start, failures = asyncio.create_subprocess_exec, [True, False, False]

    async def sometimes(*command: Any, **settings: Any) -> asyncio.subprocess.Process:
        if failures and failures.pop(0):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start(*command, **settings)

    async def check(supervisor: Supervisor) -> None:
        await supervisor.all_ready()
        before = listener(supervised.ports[1])
        monkeypatch.setattr(asyncio, "create_subprocess_exec", sometimes)
        seen = supervised.log.getvalue().count("ready after")
        os.kill(listener(supervised.ports[0]), signal.SIGKILL)
        await asyncio.to_thread(
            wait_until, lambda: supervised.log.getvalue().count("ready after") > seen, "ready again"
        )
        assert (listener(supervised.ports[1]) == before) != is_group

    supervised.run(check)
    assert supervised.said("did not start (Resource temporarily unavailable); starting it again in")


def test_stop_leaves_no_process(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, 2)
    before = {pid.number for pid in descendants(os.getpid())}
    seen: set[int] = set()

    async def check(supervisor: Supervisor) -> None:
        await supervisor.all_ready()
        seen.update(pid.number for pid in descendants(os.getpid()) if pid.number not in before)

    supervised.run(check)
    assert len(seen) == 4  # each worker and its fake scheduler
    wait_until(lambda: not seen & {p.number for p in descendants(1)}, "all are gone")
