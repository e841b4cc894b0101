"""The scheduler's side of one grammar worker."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from mla_router.worker.grammar import protocol
from mla_router.worker.grammar.errors import Problem
from mla_router.worker.grammar.fork_server import STOPPED, ForkServer, state_of
from mla_router.worker.grammar.protocol import (
    Compiled,
    Ended,
    Fill,
    Filled,
    Frame,
    FromWorker,
    Open,
    Order,
    Refused,
    Row,
    Started,
)
from mla_router.worker.messages import Grammar

# Timeout of a grammar worker in seconds. The kernel ends one that takes too much CPU time long before. One that is stopped by a
# signal is found sooner: all requests of the scheduler wait for it.
STALL_S = 5.0
STOPPED_S = 0.5
# Signals after an exceeded limit: CPU time, depth of recursion, memory.
_OWN_FAULTS = frozenset({signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT})
_LOST = "This worker has lost the processes of its grammars"
_KILLED = "The process of this grammar was killed"
_STOPPED = "The process of this grammar does not answer"

_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(protocol.FromWorker)
_encoder = msgspec.msgpack.Encoder()


class WorkerLost(Exception):
    """The grammar worker has ended, or has refused the grammar."""

    def __init__(self, problem: Problem, *, out_of_time: bool = False) -> None:
        """`out_of_time`: the compilation exceeded its CPU time; a longer one may succeed."""
        super().__init__(problem.reason)
        self.problem = problem
        self.out_of_time = out_of_time


class GrammarWorker:
    """Requests a process from the fork server, sends requests to this process, and receives the answers in order."""

    def __init__(
        self,
        grammar: Grammar,
        control: socket.socket,
        fork_server: ForkServer,
        compile_cpu_s: float,
    ) -> None:
        self.grammar = grammar
        self.compile_cpu_s = compile_cpu_s
        self._fork_server = fork_server
        self._generation = fork_server.generation
        self.keys: set[int] = set()
        self.eos_ids: frozenset[int] = frozenset()
        self.own_bytes = 0
        self._pid = 0  # 0 until it has started
        self._next_check = 0.0  # monotonic time of `_check_running`
        self.is_compiling = True
        self._feeds: dict[int, list[int]] = {}  # earlier tokens that are not sent yet, by key
        self._opening: deque[int] = deque()  # keys whose `Open` has no answer yet
        self._closed: list[int] = []
        self._unsent: list[Row] = []  # rows of a step beyond the first `Fill`
        self._filled: Filled | None = None  # the answer to the last `Fill`
        self._opened: list[tuple[int, Problem | None]] = []  # results for `poll`
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Timeouts of the kernel: those of Python would also apply to non-blocking reads.
        for option, seconds in ((socket.SO_RCVTIMEO, STOPPED_S), (socket.SO_SNDTIMEO, STALL_S)):
            limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            self._connection.setsockopt(socket.SOL_SOCKET, option, limit)
        source = os.memfd_create("grammar")
        try:
            os.pwrite(source, _encoder.encode(Order(grammar, compile_cpu_s)), 0)
            socket.send_fds(control, [b"+"], [theirs.fileno(), source])
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            # The fork server is lost, or has not read some hundred orders. The next read finds the connection closed.
            pass
        finally:
            os.close(source)
            theirs.close()

    @property
    def has_started(self) -> bool:
        return self._pid != 0

    @property
    def has_news(self) -> bool:
        """Whether `poll` may return results, now or later."""
        return self._is_asked or bool(self._opened)

    @property
    def _is_asked(self) -> bool:
        return self.is_compiling or bool(self._opening)

    def open_key(self, key: int, output: Sequence[int]) -> None:
        self.keys.add(key)
        self._feeds[key] = list(output)
        if not self.is_compiling:
            self._open_next(key)

    def close_key(self, key: int) -> None:
        self.keys.discard(key)
        self._feeds.pop(key, None)
        self._closed.append(key)
        self._opened = [item for item in self._opened if item[0] != key]

    def poll(self) -> list[tuple[int, Problem | None]]:
        """Returns the results that have arrived, as `GrammarPool.poll`. Raises WorkerLost."""
        while self._is_asked and self._receive(wait=False):
            pass
        opened, self._opened = self._opened, []
        return opened

    def ask_masks(self, rows: list[Row]) -> None:
        self._unsent = rows
        self._fill_next()

    def wait_masks(self) -> Filled:
        """Waits until the masks of all rows except `strays` are written. Returns the answer. Raises WorkerLost."""
        strays: list[int] = []
        runs: dict[int, list[int]] = {}
        counts: dict[int, int] = {}
        while True:
            while self._filled is None:
                self._receive(wait=True)
            strays += self._filled.strays
            runs |= self._filled.runs
            counts |= self._filled.counts
            if not self._unsent:
                return Filled(strays, runs, counts)
            self._fill_next()  # only after the answer, or both sides could block in a write

    def end(self) -> None:
        """Closes the connection. The process ends then."""
        self._connection.close()

    def _receive(self, *, wait: bool) -> bool:
        """Receives one answer. Returns False if there is none yet. Raises WorkerLost."""
        give_up = time.monotonic() + STALL_S
        while True:
            try:
                frame = self._connection.recv(
                    protocol.MAX_FRAME, 0 if wait else socket.MSG_DONTWAIT
                )
                break
            except BlockingIOError:  # no frame, or none for STOPPED_S
                self._check_running()
                if not wait:
                    return False
                if time.monotonic() > give_up:
                    frame = b""
                    break
            except ConnectionResetError:
                # The process ended with unread frames. The kernel reports this once, before its last frames.
                pass
        self._take(frame)
        return True

    def _check_running(self) -> None:
        """Ends the process if it is stopped by a signal: others wait for it. Not at each call, because the step loop polls
        in each step, but at the end of each wait. Raises WorkerLost."""
        if (now := time.monotonic()) < self._next_check:
            return
        self._next_check = now + STOPPED_S / 2
        if state_of(self._pid) == STOPPED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            raise WorkerLost(Problem(_STOPPED, is_of_grammar=False))

    def _take(self, frame: bytes) -> None:
        if not frame:
            lost = self._fork_server.has_lost(self._generation)
            raise WorkerLost(Problem(_LOST if lost else _STOPPED, is_of_grammar=False))
        message = _decoder.decode(frame)
        if isinstance(message, Ended):
            raise self._end_of(message.status)
        if self.is_compiling:
            if isinstance(message, Refused):
                raise WorkerLost(Problem(message.reason))
            if isinstance(message, Started):
                self._pid = message.pid
                return
            assert isinstance(message, Compiled), message
            self.is_compiling = False
            self.eos_ids, self.own_bytes = frozenset(message.eos_ids), message.own_bytes
            for key in list(self._feeds):
                self._open_next(key)
        elif isinstance(message, Filled):
            self._filled = message
        else:
            key = self._opening.popleft()
            if key not in self.keys:
                pass  # it was closed in the meantime
            elif isinstance(message, Refused):
                self._opened.append((key, Problem(message.reason)))
            elif self._feeds[key]:
                self._open_next(key)
            else:
                self._opened.append((key, None))

    def _end_of(self, status: int) -> WorkerLost:
        """Returns the reason for exit status `status`."""
        if status < 0 and -status not in _OWN_FAULTS:
            return WorkerLost(Problem(_KILLED, is_of_grammar=False))
        work = "compile" if self.is_compiling else "match text with"
        out_of_time = self.is_compiling and status == -signal.SIGPROF
        problem = Problem(f"takes too much time or memory to {work}")
        return WorkerLost(problem, out_of_time=out_of_time)

    def _fill_next(self) -> None:
        rows, self._unsent = self._unsent[: protocol.FILL_ROWS], self._unsent[protocol.FILL_ROWS :]
        self._filled = None
        self._send(Fill(rows, self._take_closed()))

    def _open_next(self, key: int) -> None:
        feed = self._feeds[key]
        self._feeds[key] = feed[protocol.OPEN_TOKENS :]
        self._opening.append(key)
        self._send(Open(key, feed[: protocol.OPEN_TOKENS], self._take_closed()))

    def _take_closed(self) -> list[int]:
        """Returns the keys closed since the last frame. There are at most as many as were open at once."""
        closed, self._closed = self._closed, []
        return closed

    def _send(self, message: Frame) -> None:
        # The next read finds a lost process.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            self._connection.send(_encoder.encode(message))
