"""A worker as a child process of the launcher."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence

from mla_router.launch.health import until_healthy, until_silent
from mla_router.launch.process import Process
from mla_router.launch.supervisor import End
from mla_router.worker.config import WorkerConfig

WorkerCommand = Callable[[WorkerConfig], Sequence[str]]


def worker_command(config: WorkerConfig) -> list[str]:
    """Returns the command of a worker that ends with this process."""
    # -u: unbuffered output.
    command = [sys.executable, "-u", "-m", "mla_router.worker", *config.to_argv()]
    return [*command, f"--parent-pid={os.getpid()}"]


class LocalWorker:
    """A `Worker` of this machine. Each line of its output goes to `show`."""

    def __init__(
        self,
        config: WorkerConfig,
        command: Sequence[str],
        show: Callable[[str], None],
        inherited: Sequence[int] = (),
    ) -> None:
        """`inherited`: descriptors for the process."""
        self._inherited = inherited
        self._config = config
        self._command = command
        self._show = show
        self._process: Process | None = None

    async def run(self, on_ready: Callable[[str], None]) -> End:
        try:
            process = await Process.start(
                self._command, self._show, self._config.child_environment(), self._inherited
            )
        except OSError as error:  # too many processes, or too little memory
            return End(1, f"did not start ({error.strerror})")
        self._process = process
        health = asyncio.create_task(self._watch_health(process, on_ready))
        try:
            status = await process.wait()
        finally:
            health.cancel()
        self._process = None
        return End(status)

    async def _watch_health(self, process: Process, on_ready: Callable[[str], None]) -> None:
        """Reports that the worker is ready, and kills it if it then stops answering."""
        host, port = self._config.host, self._config.port
        await until_healthy(host, port)
        on_ready(f"process {process.pid}")
        await until_silent(host, port, self._config.watchdog_timeout, self._show)
        process.kill()

    async def stop(self, grace_s: float) -> None:
        if self._process is not None:
            await self._process.stop(grace_s)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
