"""Starts the workers and restarts them when they end.

A worker that was ready once is restarted without limit. The delay doubles with each failure, until the worker has been
healthy for a while. If a worker never becomes ready, a restart would not help (a broken model, too little memory):
after a few attempts the supervisor gives up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from mla_router.launch.health import until_healthy
from mla_router.launch.output import Output
from mla_router.launch.process import Process, describe_exit
from mla_router.worker.config import WorkerConfig

WorkerCommand = Callable[[WorkerConfig], Sequence[str]]

# Exit status of a worker with wrong settings; the same as argparse's.
USAGE_ERROR = 2


class GaveUpError(RuntimeError):
    """A worker does not start, and a restart would not help."""


@dataclass(frozen=True)
class RestartPolicy:
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    proven_s: float = 60.0  # after this healthy time the delay begins again at the first one
    attempts: int = 3  # failed first starts before the supervisor gives up

    def delay_s(self, failures: int) -> float:
        """Returns the delay after `failures` failures in a row."""
        return min(self.first_delay_s * 2.0 ** (failures - 1), self.max_delay_s)


class Supervisor:
    """The workers of one launcher. `start`, then `stop` or `kill`."""

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        command: WorkerCommand,
        output: Output,
        policy: RestartPolicy,
    ) -> None:
        self._members = [
            _Member(index, config, command(config), output, policy)
            for index, config in enumerate(workers)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(member.keep_running()) for member in self._members]

    async def all_ready(self) -> None:
        """Waits until every worker has been ready once."""
        for member in self._members:
            await member.ready.wait()

    async def lost(self) -> NoReturn:
        """Waits for a worker that cannot be started. Raises GaveUpError, or the error of its start."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert error is not None, "keep_running ends in no other way"
        raise error

    async def stop(self, grace_s: float) -> None:
        """Stops all workers without restarts. SIGKILL ends those that take longer than `grace_s`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.stop(grace_s) for member in self._members))

    def kill(self) -> None:
        for member in self._members:
            member.kill()


class _Member:
    """One worker, across its restarts."""

    def __init__(
        self,
        index: int,
        config: WorkerConfig,
        command: Sequence[str],
        output: Output,
        policy: RestartPolicy,
    ) -> None:
        self.ready = asyncio.Event()  # set when the worker was ready once
        self._index = index
        self._config = config
        self._command = command
        self._output = output
        self._policy = policy
        self._process: Process | None = None

    async def keep_running(self) -> None:
        failures = 0
        while True:
            status, healthy_s = await self._run_once()
            self._process = None
            failures = 1 if healthy_s >= self._policy.proven_s else failures + 1
            self._check_attempts(status, failures)
            delay = self._policy.delay_s(failures)
            self._say(f"{describe_exit(status)}; starting it again in {delay:g} s")
            await asyncio.sleep(delay)

    async def stop(self, grace_s: float) -> None:
        if self._process is not None:
            await self._process.stop(grace_s)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def _run_once(self) -> tuple[int, float]:
        """Runs the worker until it ends. Returns its exit status and the seconds for which it was healthy."""
        started = time.monotonic()
        self._process = await Process.start(
            self._command,
            lambda line: self._output.worker(self._index, line),
            self._config.child_environment(),
        )
        health = asyncio.create_task(until_healthy(self._config.host, self._config.port))
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait([health, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result(), 0.0
            ready = time.monotonic()
            self.ready.set()
            self._say(f"ready after {ready - started:.1f} s, process {self._process.pid}")
            return await ended, time.monotonic() - ready
        finally:
            health.cancel()
            ended.cancel()

    def _check_attempts(self, status: int, failures: int) -> None:
        if self.ready.is_set():
            return
        reason = f"worker {self._index} {describe_exit(status)} before it was ready"
        if status == USAGE_ERROR:
            raise GaveUpError(f"{reason}; see its log lines above")
        if failures >= self._policy.attempts:
            raise GaveUpError(f"{reason}, {failures} times; see its log lines above")

    def _say(self, text: str) -> None:
        self._output.launch(f"worker {self._index} {text}")
