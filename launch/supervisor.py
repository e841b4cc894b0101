"""Starts the workers and restarts them when they end.

A worker that was ready once is restarted without limit. The delay doubles with each failure, until the worker has been
healthy for a while. If a worker never becomes ready, a restart would not help (a broken model, too little memory):
after a few attempts the supervisor gives up. The loss of a machine is no such attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from mla_router.launch.output import Output
from mla_router.launch.process import describe_exit
from mla_router.worker.config import EXIT_BAD_SETTINGS


class GaveUpError(RuntimeError):
    """A worker does not start, and a restart would not help."""


@dataclass(frozen=True)
class RestartPolicy:
    """Delays before the restarts of a worker, and the number of attempts."""

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    proven_s: float = 60.0  # after this healthy time the delay begins again at the first one
    attempts: int = 3  # failed first starts before the supervisor gives up

    def delay_s(self, failures: int) -> float:
        """Returns the delay after `failures` failures in a row."""
        return min(self.first_delay_s * 2.0 ** (failures - 1), self.max_delay_s)


@dataclass(frozen=True)
class End:
    """The end of a worker: its exit status, or the loss of its machine."""

    status: int | None  # None: the machine was lost
    reason: str = ""  # empty: the status says all

    def __str__(self) -> str:
        return self.reason or describe_exit(self.status or 0)


class Worker(Protocol):
    """A worker that can run again after its end."""

    async def run(self, on_ready: Callable[[str], None]) -> End:
        """Runs the worker until it ends. Calls `on_ready` with its process or address when it is healthy."""

    async def stop(self, grace_s: float) -> None:
        """Stops the worker after `run` was cancelled. SIGKILL follows after `grace_s`."""

    def kill(self) -> None:
        """Ends the worker at once."""


class Supervisor:
    """The workers of one launcher. `start`, then `stop` or `kill`."""

    def __init__(self, workers: Sequence[Worker], output: Output, policy: RestartPolicy) -> None:
        self._members = [
            _Member(index, worker, output, policy) for index, worker in enumerate(workers)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(member.keep_running()) for member in self._members]

    async def all_ready(self) -> None:
        """Waits until every worker has been ready once."""
        for member in self._members:
            await member.ready.wait()

    async def lost(self) -> NoReturn:
        """Waits for a worker that cannot be started. Raises GaveUpError."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert error is not None, "keep_running ends in no other way"
        raise error

    async def stop(self, grace_s: float) -> None:
        """Stops all workers without restarts. SIGKILL ends those that take longer than `grace_s`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.worker.stop(grace_s) for member in self._members))

    def kill(self) -> None:
        for member in self._members:
            member.worker.kill()


class _Member:
    """One worker, across its restarts."""

    def __init__(self, index: int, worker: Worker, output: Output, policy: RestartPolicy) -> None:
        self.ready = asyncio.Event()  # set when the worker was ready once
        self.worker = worker
        self._index = index
        self._output = output
        self._policy = policy

    async def keep_running(self) -> None:
        failures = 0
        while True:
            end, healthy_s = await self._run_once()
            if end.status is None or healthy_s >= self._policy.proven_s:
                failures = 1
            else:
                failures += 1
            self._check_attempts(end, failures)
            delay = self._policy.delay_s(failures)
            self._say(f"{end}; starting it again in {delay:g} s")
            await asyncio.sleep(delay)

    async def _run_once(self) -> tuple[End, float]:
        """Runs the worker until it ends. Returns its end and the seconds for which it was healthy."""
        started = time.monotonic()
        ready: float | None = None

        def on_ready(where: str) -> None:
            nonlocal ready
            ready = time.monotonic()
            self.ready.set()
            self._say(f"ready after {ready - started:.1f} s, {where}")

        end = await self.worker.run(on_ready)
        return end, 0.0 if ready is None else time.monotonic() - ready

    def _check_attempts(self, end: End, failures: int) -> None:
        if self.ready.is_set() or end.status is None:
            return
        reason = f"worker {self._index} {end} before it was ready"
        if end.status == EXIT_BAD_SETTINGS:
            raise GaveUpError(f"{reason}; see its log lines above")
        if failures >= self._policy.attempts:
            raise GaveUpError(f"{reason}, {failures} times; see its log lines above")

    def _say(self, text: str) -> None:
        self._output.launch(f"worker {self._index} {text}")
