"""Log lines to a descriptor that never block their process.

A reader that pauses, such as a stopped terminal or a stuck log collector, must not stop a worker. A thread as in the
launcher (`launch/output.py`) would forbid the fork of the grammar supervisor. So a line that a full pipe does not take
is lost, and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import stat
from collections.abc import Callable

from mla_router.worker.log_format import RouterFormatter, timestamp

MAX_WAIT_S = 0.2  # for a slow reader; a reader that has paused costs it once


class LogLines(logging.Handler):
    """Writes records as lines, in the format of the router's log lines."""

    def __init__(self, descriptor: int, name: str = "") -> None:
        """`name`: written before each message."""
        super().__init__()
        self.setFormatter(RouterFormatter(name))
        self._descriptor = descriptor
        self._write = unblocked_write(descriptor)
        self._lost = 0  # lines since the last one that was written
        self._is_cut = False  # the last line has no end

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except (KeyError, TypeError, ValueError):  # wrong arguments of a log call
            self.handleError(record)
            return
        if self._lost:
            reason = f"{self._lost} log lines are lost: their reader has paused"
            line = f"{timestamp(record.created)}  WARN {reason}\n{line}"
        if self._is_cut:
            line = f"\n{line}"
        try:
            self._write_all(f"{line}\n".encode(errors="backslashreplace"))
        except BlockingIOError:
            self._lost += 1
        except OSError:  # as on a full disk, or without a reader
            pass
        else:
            self._lost = 0

    def _write_all(self, data: bytes) -> None:
        """Raises BlockingIOError, OSError."""
        while data:
            try:
                written = self._write(data)
            except BlockingIOError:
                if self._lost or not self._has_room():
                    raise
                continue
            data = data[written:]
            self._is_cut = bool(data)

    def _has_room(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(MAX_WAIT_S * 1000))


def unblocked_write(descriptor: int) -> Callable[[bytes], int]:
    """Returns `os.write` to `descriptor` that raises BlockingIOError instead of waiting. The descriptor itself stays as
    it is: other programs, such as the shell, use the same open file. Writes to regular files may wait for their disk."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):  # such as systemd's journal
        connection = socket.socket(fileno=os.dup(descriptor))
        return lambda data: connection.send(data, socket.MSG_DONTWAIT)
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        with contextlib.suppress(OSError):  # of a file of another user, such as after `su`
            descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
    return lambda data: os.write(descriptor, data)
