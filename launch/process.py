"""One child process: its output line by line, its end, and ways to bring that about.

A child leads a session of its own. So Ctrl-C in a terminal reaches the launcher alone, which then
decides, and whatever the child has started itself can be killed with it as one group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence

MAX_LINE = 1 << 16  # a longer line is shown in pieces
OUTPUT_END_S = 1.0  # for the last output, if somebody outside the group still holds the pipe


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
    ) -> Process:
        """Start `command`; each line of its stdout and stderr goes to `show`. Without
        an `environment` it has ours."""
        # A pipe of our own: asyncio's would make `wait` last as long as any grandchild holds it.
        reading, writing = os.pipe()
        try:
            child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                env=environment,
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
        """The exit status, negative for a signal; then nothing of its group is left."""
        status = await self._child.wait()
        self.kill()
        await asyncio.wait([self._output], timeout=OUTPUT_END_S)
        return status

    async def stop(self, grace_s: float) -> int:
        """SIGTERM to the child, which ends its own children; SIGKILL to all after `grace_s`."""
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        killing = asyncio.get_running_loop().call_later(grace_s, self.kill)
        try:
            return await self.wait()
        finally:
            killing.cancel()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    """`exited with code 3`, `was ended by signal 9 (Killed)`."""
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
    # A progress bar paints over itself with carriage returns: its last state is the line.
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
