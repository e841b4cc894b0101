"""The process that has a fork server, and starts another one if that dies.

The scheduler cannot fork once it has threads and a device. So it forks a supervisor before that; the supervisor
loads nothing and does nothing else. A supervisor that was killed is replaced by a new Python process, which
takes some seconds to import what a forked one has from the scheduler:

    python -m mla_router.worker.grammar.supervisor PARENT_PID SETTINGS
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Union

import msgspec
import numpy as np
from setproctitle import setproctitle

from mla_router.worker.child import die_with_parent
from mla_router.worker.grammar import fork_server
from mla_router.worker.grammar.fork_server import ForkServer
from mla_router.worker.grammar.options import GrammarOptions

logger = logging.getLogger(__name__)

RESTART_PAUSE_S = 0.1


class Settings(msgspec.Struct, frozen=True):
    """What a supervisor has to know. Descriptors are valid in the supervisor's process."""

    folder: str
    vocab_size: int
    max_rows: int
    options: GrammarOptions
    masks_fd: int  # file of the masks: [max_rows, ceil(vocab_size / 32)] int32
    fork_server_fd: int  # file of `ForkServer`
    control_fd: int = -1  # end of the socket on which the scheduler orders grammar workers

    @property
    def mask_shape(self) -> tuple[int, int]:
        return self.max_rows, -(-self.vocab_size // 32)

    def masks(self) -> np.ndarray:
        rows, words = self.mask_shape
        memory = mmap.mmap(self.masks_fd, rows * words * 4)
        return np.frombuffer(memory, dtype=np.int32).reshape(rows, words)


class Forked:
    """A forked child process, with the methods of `subprocess.Popen` that its owner needs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status; None while it lives."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self._pid, options)
            if pid != 0:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status


Supervisor = Union[Forked, "subprocess.Popen[bytes]"]


def start(settings: Settings) -> tuple[Supervisor, socket.socket]:
    """Fork a supervisor; returns it and the scheduler's end of the control socket. To be called before this
    process has threads: a lock that another thread holds during the fork stays locked in the child."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ours.close()
            _keep(msgspec.structs.replace(settings, control_fd=theirs.fileno()), parent)
            status = 0
        finally:
            os._exit(status)  # nothing of the scheduler's own clean-up
    theirs.close()
    return Forked(pid), ours


def replace(settings: Settings) -> tuple[Supervisor, socket.socket]:
    """Start a new Python process as a supervisor; returns as `start`. Safe at any time."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        told = msgspec.structs.replace(settings, control_fd=theirs.fileno())
        command = [sys.executable, "-m", "mla_router.worker.grammar.supervisor", str(os.getpid())]
        process = subprocess.Popen(
            [*command, msgspec.json.encode(told, enc_hook=_path_as_text).decode()],
            stdin=subprocess.DEVNULL,
            pass_fds=(told.control_fd, told.masks_fd, told.fork_server_fd),
        )
    return process, ours


def _path_as_text(value: object) -> str:
    assert isinstance(value, Path), value
    return str(value)


def _path_of_text(kind: type, text: str) -> Path:
    assert kind is Path, kind
    return Path(text)


def _keep(settings: Settings, parent_pid: int) -> None:
    """Have a fork server until the scheduler closes the control socket. Returns then; and in all the
    processes that come of this one, at their end."""
    die_with_parent(parent_pid)
    setproctitle("mla_router grammar supervisor")
    control = socket.socket(fileno=settings.control_fd)
    masks, shared = settings.masks(), ForkServer(settings.fork_server_fd)
    own = os.getpid()
    while True:
        pid = os.fork()
        if pid == 0:
            die_with_parent(own)
            setproctitle("mla_router grammar fork server")
            shared.begin()
            folder = Path(settings.folder)
            fork_server.run(control, shared, folder, settings.vocab_size, settings.options, masks)
            return
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0:
            return
        # The next grammar finds the next one: it loads when that comes, so that one that cannot
        # load does not try for ever. The pause is for one that dies before it waits for a grammar.
        logger.error("the grammar fork server has ended with status %d; another one begins", status)
        time.sleep(RESTART_PAUSE_S)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s")
    told = msgspec.json.decode(sys.argv[2], type=Settings, dec_hook=_path_of_text)
    _keep(told, int(sys.argv[1]))
