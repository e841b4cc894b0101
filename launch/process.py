"""One child process: its start, its output line by line, and its end.

A child has its own session. So Ctrl-C in a terminal reaches only the launcher, and one signal to the group kills the
child with all processes that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

MAX_LINE = 1 << 16  # longer lines are split
OUTPUT_END_S = 1.0  # time for the last output, if a process outside the group still has the pipe
GROUP_END_S = 1.0  # time for the end of killed processes
REAP_PERIOD_S = 0.02  # between two looks for killed processes that have ended


class Process:
    """A running child, made by `start`."""

    def __init__(self, child: asyncio.subprocess.Process, output: asyncio.Task[None]) -> None:
        self._child = child
        self._output = output

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        show: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
    ) -> Process:
        """Starts `command`. Each line of its stdout and stderr goes to `show`. `environment` defaults to that of this
        process. `inherited`: descriptors for the child."""
        # With asyncio's own pipe `wait` would last until every grandchild has closed it.
        reading, writing = os.pipe()
        try:
            child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                env=environment,
                pass_fds=inherited,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return cls(child, asyncio.create_task(_show_lines(reading, show)))

    @property
    def pid(self) -> int:
        return self._child.pid

    async def wait(self) -> int:
        """Waits for the end and kills the rest of the group. Returns the exit status; negative for a signal."""
        status = await self._child.wait()
        self.kill()
        await asyncio.wait([self._output], timeout=OUTPUT_END_S)
        await self._reap_group()
        return status

    async def stop(self, grace_s: float) -> int:
        """Sends SIGTERM to the child, which ends its own children; after `grace_s` SIGKILL to the group. Returns the
        exit status."""
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        killing = asyncio.get_running_loop().call_later(grace_s, self.kill)
        try:
            return await self.wait()
        finally:
            killing.cancel()

    async def _reap_group(self) -> None:
        """Reaps the rest of the group if its processes are now children of this one. In a container without an init process
        they are, and would stay as zombies."""
        until = time.monotonic() + GROUP_END_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < until:
                if os.waitpid(-self.pid, os.WNOHANG) == (0, 0):  # noqa: ASYNC222 (it does not wait)
                    await asyncio.sleep(REAP_PERIOD_S)

    def kill(self) -> None:
        """Sends SIGKILL to the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    """Returns `exited with code 3` or `was ended by signal 9 (Killed)`."""
    if status >= 0:
        return f"exited with code {status}"
    return f"was ended by signal {-status} ({signal.strsignal(-status)})"


async def _show_lines(reading: int, show: Callable[[str], None]) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
    )
    rest = b""
    try:
        while chunk := await reader.read(MAX_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                show(_text(line))
            if len(rest) >= MAX_LINE:
                show(_text(rest))
                rest = b""
    finally:
        transport.close()
        if rest:
            show(_text(rest))


def _text(line: bytes) -> str:
    # A progress bar overwrites itself with carriage returns: only its last state is shown.
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
