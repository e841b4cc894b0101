"""The fork server: the process from which all grammar workers are forked.

It loads the vocabulary and xgrammar, which the grammar workers share, and never reads a grammar. It is forked from the
scheduler before the scheduler has threads or a device, so that torch, which xgrammar needs, is imported once.
`supervisor.py` starts it, and starts another one if it dies.
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
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
from setproctitle import setproctitle

from mla_router.worker.child import die_with_parent
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.protocol import Ended, Frame, Refused
from mla_router.worker.grammar.vocabulary import read_vocabulary

logger = logging.getLogger(__name__)

# `state_of` a process that is stopped by a signal, and of one that has ended or is gone
STOPPED, DEAD = "T", ("Z", "X")

# Runs a grammar worker, given its end of a socket and the file descriptor of its grammar.
Serve = Callable[[socket.socket, int], None]


class ForkServer:
    """The state of the fork server, in memory that all processes of the grammars share."""

    BYTES = 24

    def __init__(self, shared_fd: int) -> None:
        """`shared_fd` is a file of `BYTES` bytes that all these processes have open."""
        # [number of fork servers so far, pid of the last one, monotonic time of its readiness in ns or 0]
        self._shared = np.frombuffer(mmap.mmap(shared_fd, self.BYTES), dtype=np.int64)

    @property
    def generation(self) -> int:
        """The number of the current fork server; 1 before the first one has started."""
        return max(1, int(self._shared[0]))

    @property
    def pid(self) -> int:
        return int(self._shared[1])

    def begin(self) -> None:
        """Registers this process as the next fork server."""
        self.expect_next()
        self._shared[1] = os.getpid()
        self._shared[0] += 1

    @property
    def loaded_at(self) -> float | None:
        """The time (`time.monotonic`, common to all processes) of readiness; None while the fork server loads."""
        return int(self._shared[2]) / 1e9 or None

    def set_loaded(self) -> None:
        """Registers that this fork server can start grammar workers."""
        self._shared[2] = time.monotonic_ns()

    def expect_next(self) -> None:
        """Registers that the fork server is lost and the next one has to load."""
        self._shared[2] = 0

    def has_lost(self, generation: int) -> bool:
        """Returns whether fork server number `generation` has died, and all its grammar workers with it."""
        return generation != self.generation or self.state in DEAD

    @property
    def state(self) -> str:
        """The state of the fork server (`state_of`)."""
        return state_of(self.pid)

    def kill(self) -> None:
        """Ends the fork server and all its grammar workers. The supervisor starts another one, which reads the orders."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def state_of(pid: int) -> str:
    """Returns the letter of a process in proc(5); X for one that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


def run(
    control: socket.socket,
    shared: ForkServer,
    folder: Path,
    vocab_size: int,
    options: GrammarOptions,
    masks: np.ndarray,
) -> None:
    """Forks a grammar worker for each pair of descriptors on `control`: its end of a socket, and a file with its
    grammar.

    Loads the vocabulary and xgrammar at the first message, which may have no descriptors. Returns when the scheduler
    closes `control`; in a grammar worker, at its end.
    """
    _wait_for(control)
    try:
        # Imported here because it takes a second, and the scheduler imports this module.
        with _without_transformers():
            from mla_router.worker.grammar import grammar_worker
            from mla_router.worker.grammar.jump_forward import ForcedTokens
            from mla_router.worker.grammar.xgrammar_backend import Compiler
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # missing or broken
        logger.error(
            "structured outputs are refused: xgrammar cannot be loaded (%s: %s); reinstall xgrammar and its "
            "dependencies, or start with --grammar-backend none",
            type(error).__name__,
            error,
        )
        _refuse_all(control, "this worker cannot load xgrammar; its log says why")
        return
    try:
        vocabulary = read_vocabulary(folder, vocab_size, options.tokenizer_folder)
        compiler = Compiler(vocabulary, any_whitespace=options.any_whitespace)
        forced = ForcedTokens(vocabulary) if options.jump_forward else None
    except Exception as error:  # noqa: BLE001 (another fork server would fail in the same way, again and again)
        logger.warning("no grammars: %s: %s", type(error).__name__, error)
        _refuse_all(control, "this model's tokenizer is not supported")
        return
    gc.collect()
    gc.freeze()  # else the garbage collection of a grammar worker would copy every shared page

    def serve(connection: socket.socket, source: int) -> None:
        grammar_worker.run(connection, source, compiler, forced, masks)

    shared.set_loaded()
    _WorkerForks(control, serve).run()


@contextlib.contextmanager
def _without_transformers() -> Iterator[None]:
    """Within the block, `from transformers import X` gives an empty class, if transformers is not imported yet.

    xgrammar imports it for the tokenizers and the generation loop of transformers, which no grammar uses. Its import
    takes 0.8 s, three quarters of the import of xgrammar.
    """
    if "transformers" in sys.modules:
        yield
        return

    def empty_class(name: str) -> type:
        if name.startswith("_"):  # read by the import system
            raise AttributeError(name)
        return type(name, (), {})

    module = ModuleType("transformers")
    module.__getattr__ = empty_class  # type: ignore[method-assign]
    sys.modules["transformers"] = module
    try:
        yield
    finally:
        del sys.modules["transformers"]


class _WorkerForks:
    """Forks and reaps grammar workers. It keeps each worker's end of the socket, and reports the exit status there, because
    only the parent process receives the status."""

    def __init__(self, control: socket.socket, serve: Serve) -> None:
        self._control = control
        self._serve = serve
        self._connections: dict[int, int] = {}  # descriptors, by pid
        self._own_pid = os.getpid()

    def run(self) -> None:
        """Returns when the scheduler closes its end; in a grammar worker, at its end."""
        deaths, wakeup = socket.socketpair()
        for end in (deaths, wakeup):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # arrives through `wakeup`
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
            try:
                pid = os.fork()
            except OSError as error:  # too many processes, or too little memory
                logger.error("a grammar worker cannot be started: %s", error)
                for descriptor in order:
                    os.close(descriptor)
                continue
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
    """Waits until a socket is readable. Returns all readable ones. `select.select` fails for descriptors above 1023."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ, each)
        return [key.data for key, _ in selector.select()]


def _refuse_all(control: socket.socket, reason: str) -> None:
    """Refuses all grammars until the other end is closed."""
    while (order := _receive(control)) is not None:
        if order:
            _tell(order[0], Refused(reason))
            os.close(order[1])


def _receive(control: socket.socket) -> list[int] | None:
    """Returns the descriptors of the next message; None when the other end is closed."""
    message, fds, _, _ = socket.recv_fds(control, 1, 2)
    return fds if message else None


def _tell(descriptor: int, frame: Frame) -> None:
    """Sends the last frame on a grammar worker's end of its socket, and closes this end."""
    # The scheduler may have closed its end, or may not read; then it finds this end closed.
    gone = contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError)
    with socket.socket(fileno=descriptor) as connection, gone:
        connection.send(msgspec.msgpack.encode(frame), socket.MSG_DONTWAIT)
