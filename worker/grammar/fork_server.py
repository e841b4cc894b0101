"""The process that all grammars' processes are forked from.

It loads what they share, the vocabulary and xgrammar, and never looks at a grammar itself. It is forked
from the scheduler before that has threads or a device, so that torch, which xgrammar needs, is imported
once. `supervisor.py` starts it, and starts another one if it dies.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from setproctitle import setproctitle

from mla_router.worker.child import die_with_parent
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.protocol import Ended, Frame, Refused
from mla_router.worker.grammar.vocabulary import VocabularyError, read_vocabulary

logger = logging.getLogger(__name__)

Serve = Callable[
    [socket.socket, int], None
]  # a grammar worker's life: its end of a socket, its grammar's file


class ForkServer:
    """Which fork server there is, as all processes of the grammars see it."""

    BYTES = 24

    def __init__(self, shared_fd: int) -> None:
        """`shared_fd` is a file of `BYTES` that all these processes have open."""
        # [number of fork servers so far, pid of the last, time at which it had loaded (ns) or 0]
        self._shared = np.frombuffer(mmap.mmap(shared_fd, self.BYTES), dtype=np.int64)

    @property
    def generation(self) -> int:
        """Number of the fork server that takes orders, or 1 if the first is still to come."""
        return max(1, int(self._shared[0]))

    @property
    def pid(self) -> int:
        return int(self._shared[1])

    def begin(self) -> None:
        """Register this process as the next fork server."""
        self.expect_next()
        self._shared[1] = os.getpid()
        self._shared[0] += 1

    @property
    def loaded_at(self) -> float | None:
        """Time of `time.monotonic`, which all processes share; None while the fork server has to load."""
        return int(self._shared[2]) / 1e9 or None

    def set_loaded(self) -> None:
        """Register that this process, the fork server, can start grammar workers."""
        self._shared[2] = time.monotonic_ns()

    def expect_next(self) -> None:
        """Register that the fork server is lost: the next one has to load."""
        self._shared[2] = 0

    def has_lost(self, generation: int) -> bool:
        """Whether the fork server of that generation has died, and all its grammar workers with it."""
        if generation != self.generation:
            return True
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat.rpartition(")")[2].split()[0] in "ZX"


def run(
    control: socket.socket,
    shared: ForkServer,
    folder: Path,
    vocab_size: int,
    options: GrammarOptions,
    masks: np.ndarray,
) -> None:
    """Fork a grammar worker for every pair of descriptors that comes over `control`: its end of a socket, and
    a file with the grammar. Returns when the scheduler closes it, and in the grammar workers at their end.

    Loads what grammar workers need when the first message comes, which may be without descriptors.
    """
    _wait_for(control)
    try:
        # Here and not above: this takes seconds, and the scheduler that imports this module is not
        # to wait for it.
        from mla_router.worker.grammar import grammar_worker
        from mla_router.worker.grammar.jump_forward import ForcedTokens
        from mla_router.worker.grammar.xgrammar_backend import Compiler
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # missing or broken
        logger.error(
            "structured output is refused: xgrammar cannot be loaded (%s: %s); install it and what it "
            "needs again, or start with --grammar-backend none",
            type(error).__name__,
            error,
        )
        _refuse_all(control, "this worker cannot load xgrammar; its log says why")
        return
    try:
        vocabulary = read_vocabulary(folder, vocab_size, options.tokenizer_folder)
        compiler = Compiler(vocabulary, any_whitespace=options.any_whitespace)
        forced = ForcedTokens(vocabulary) if options.jump_forward else None
    except VocabularyError as error:
        logger.warning("no grammars: %s", error)
        _refuse_all(control, "this model's tokenizer is not supported")
        return
    gc.collect()
    gc.freeze()  # or the grammar workers' collections would copy every page that they share

    def serve(connection: socket.socket, source: int) -> None:
        grammar_worker.run(connection, source, compiler, forced, masks)

    shared.set_loaded()
    _WorkerForks(control, serve).run()


class _WorkerForks:
    """Forks grammar workers and reaps them. Keeps a grammar worker's end of its socket to say there why it has ended:
    only its parent learns that."""

    def __init__(self, control: socket.socket, serve: Serve) -> None:
        self._control = control
        self._serve = serve
        self._connections: dict[int, int] = {}  # descriptors, by pid
        self._own_pid = os.getpid()

    def run(self) -> None:
        """Return when the scheduler closes its end, and in each grammar worker at its end."""
        deaths, wakeup = socket.socketpair()
        for end in (deaths, wakeup):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # heard through `wakeup`
        signal.set_wakeup_fd(wakeup.fileno())
        while True:
            ready = _wait_for(self._control, deaths)
            if deaths in ready:
                deaths.recv(4096)
                self._reap()
            if self._control not in ready:
                continue
            order = _receive(self._control)
            if order is None:
                return
            if not order:
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (deaths, wakeup, self._control):
                    end.close()
                self._become_worker(order)
                return
            self._connections[pid] = order[0]
            os.close(order[1])

    def _become_worker(self, order: list[int]) -> None:
        die_with_parent(self._own_pid)
        setproctitle("mla_router grammar worker")
        for connection in self._connections.values():  # of other grammar workers
            os.close(connection)
        self._serve(socket.socket(fileno=order[0]), order[1])

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            _tell(self._connections.pop(pid), Ended(os.waitstatus_to_exitcode(status)))


def _wait_for(*sockets: socket.socket) -> list[socket.socket]:
    """Those of which at least one can be read. Not by `select.select`, which knows no descriptors above 1023."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ, each)
        return [key.data for key, _ in selector.select()]


def _refuse_all(control: socket.socket, reason: str) -> None:
    """Until the other end is closed."""
    while (order := _receive(control)) is not None:
        if order:
            _tell(order[0], Refused(reason))
            os.close(order[1])


def _receive(control: socket.socket) -> list[int] | None:
    """The descriptors of the next message; None when the other end is closed."""
    message, fds, _, _ = socket.recv_fds(control, 1, 2)
    return fds if message else None


def _tell(descriptor: int, frame: Frame) -> None:
    """Send the last frame on a grammar worker's end of its socket, and close that."""
    # The scheduler may have let go of this grammar worker; or does not read, and will find the end closed.
    gone = contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError)
    with socket.socket(fileno=descriptor) as connection, gone:
        connection.send(msgspec.msgpack.encode(frame), socket.MSG_DONTWAIT)
