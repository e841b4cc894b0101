"""The supervisor: the process that starts the fork server, and restarts it if it dies.

The scheduler cannot fork once it has threads and a device, so it forks the supervisor before. The supervisor loads
nothing. A killed supervisor is replaced by a new Python process, which takes some seconds for its imports:

    python -m mla_router.worker.grammar.supervisor PARENT_PID SETTINGS
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Union

import msgspec
from setproctitle import setproctitle

from mla_router.worker.child import die_with_parent
from mla_router.worker.grammar import fork_server
from mla_router.worker.grammar.fork_server import ForkServer
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.mask_memory import MaskMemory

logger = logging.getLogger(__name__)

RESTART_PAUSE_S = 0.1


class Settings(msgspec.Struct, frozen=True):
    """The settings of a supervisor. The descriptors are valid in its process."""

    folder: str
    vocab_size: int
    max_rows: int
    options: GrammarOptions
    masks_fd: int  # file of `MaskMemory`
    fork_server_fd: int  # file of `ForkServer`
    control_fd: int = -1  # the supervisor's end of the socket on which the scheduler orders workers

    def masks(self) -> MaskMemory:
        return MaskMemory(self.masks_fd, self.max_rows, self.vocab_size)


class Forked:
    """A forked child process, with some methods of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status; None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            if pid != 0:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status


Supervisor = Union[Forked, "subprocess.Popen[bytes]"]


def start(settings: Settings) -> tuple[Supervisor, socket.socket]:
    """Forks a supervisor. Returns it and the scheduler's end of the control socket, which never blocks.

    Call it before this process has threads: a lock that another thread holds during the fork stays locked in the child.
    """
    ours, theirs = _control_sockets()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ours.close()
            _keep(msgspec.structs.replace(settings, control_fd=theirs.fileno()), parent)
            status = 0
        finally:
            os._exit(status)  # without the scheduler's clean-up
    theirs.close()
    return Forked(pid), ours


def replace(settings: Settings) -> tuple[Supervisor, socket.socket]:
    """Starts a new Python process as the supervisor. Returns the same as `start`. Safe with threads. Raises OSError."""
    ours, theirs = _control_sockets()
    with theirs, contextlib.ExitStack() as at_failure:
        at_failure.enter_context(ours)
        told = msgspec.structs.replace(settings, control_fd=theirs.fileno())
        command = [sys.executable, "-m", "mla_router.worker.grammar.supervisor", str(os.getpid())]
        process = subprocess.Popen(
            [*command, msgspec.json.encode(told, enc_hook=_path_as_text).decode()],
            stdin=subprocess.DEVNULL,
            pass_fds=(told.control_fd, told.masks_fd, told.fork_server_fd),
        )
        at_failure.pop_all()
    return process, ours


def _control_sockets() -> tuple[socket.socket, socket.socket]:
    """Returns the ends of the scheduler, which never waits in a send, and of the supervisor."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def _path_as_text(value: object) -> str:
    assert isinstance(value, Path), value
    return str(value)


def _path_of_text(kind: type, text: str) -> Path:
    assert kind is Path, kind
    return Path(text)


def _keep(settings: Settings, parent_pid: int) -> None:
    """Runs fork servers until the scheduler closes the control socket. Returns then; in the forked processes, at their
    end."""
    die_with_parent(parent_pid)
    setproctitle("mla_router grammar supervisor")
    control = socket.socket(fileno=settings.control_fd)
    masks, shared = settings.masks().rows, ForkServer(settings.fork_server_fd)
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
        # The next fork server loads when the next grammar arrives. So a fork server that cannot load is not restarted
        # for ever. The pause limits the restarts of a fork server that dies before it waits for a grammar.
        logger.error(
            "the grammar fork server has ended with status %d; starting another one", status
        )
        time.sleep(RESTART_PAUSE_S)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s")
    told = msgspec.json.decode(sys.argv[2], type=Settings, dec_hook=_path_of_text)
    _keep(told, int(sys.argv[1]))
