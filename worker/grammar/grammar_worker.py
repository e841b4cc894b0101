"""The grammar worker: the process that compiles one grammar and writes the masks of its requests.

The kernel ends the process at an exceeded limit. The scheduler sees the end of the connection and needs no other check.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from mla_router.worker.grammar import protocol
from mla_router.worker.grammar.errors import GrammarError
from mla_router.worker.grammar.jump_forward import ForcedTokens, Output
from mla_router.worker.grammar.limits import Allowance, cpu_limit, limit_memory, own_bytes
from mla_router.worker.grammar.protocol import (
    Compiled,
    Fill,
    Filled,
    Frame,
    Open,
    Opened,
    Order,
    Refused,
    Row,
    Started,
)
from mla_router.worker.grammar.xgrammar_backend import BatchFiller, Compiler, trial_run
from mla_router.worker.host_limits import usable_cores

TRIAL_CPU_S = 1.0
COMPILE_BYTES = 512 << 20  # beyond the memory of the fork server
MATCH_BYTES = 128 << 20  # beyond the memory after the compilation
# Threads for the masks of one grammar: half of one worker's share of the cores of a usual machine.
MAX_THREADS = 8
# Address space of a thread: its stack, and twice malloc's 64 MiB, which are mapped for a moment to align its heap.
THREAD_BYTES = 160 << 20
# CPU time of one grammar in a step: a burst, and the lasting rate of a token bucket. A mask of a usual schema takes 5
# to 20 us, an expensive one 0.4 ms.
STEP_BURST_S = 0.25
STEP_RATE_S = 0.005
ROW_RATE_S = 0.002
OPEN_RATE_S = 0.02  # for one frame of `OPEN_TOKENS`

_decoder = msgspec.msgpack.Decoder(protocol.ToWorker)
_encoder = msgspec.msgpack.Encoder()


def run(
    connection: socket.socket,
    source: int,
    compiler: Compiler,
    forced: ForcedTokens | None,
    masks: np.ndarray,
) -> None:
    """Serves until the other end closes. `source` is the descriptor of a file with the `Order`; `masks` [R, words]
    int32 is shared with the scheduler."""
    limit_memory(COMPILE_BYTES)
    with open(source, "rb") as file:
        order = msgspec.msgpack.decode(file.read(), type=Order)
    _send(connection, Started(os.getpid()))
    try:
        with _ended_by_close(connection):
            with cpu_limit(order.compile_cpu_s):
                compiled = compiler.compile(order.grammar)
            with cpu_limit(TRIAL_CPU_S):
                trial_run(compiled, compiler.vocab_size)
    except GrammarError as error:
        # It may repeat texts of the grammar, which have any length, and halves of surrogate pairs.
        reason = str(error)[: protocol.MAX_REASON].encode(errors="replace").decode()
        _send(connection, Refused(reason))
        return
    except MemoryError:
        _send(connection, Refused(f"takes more than {COMPILE_BYTES >> 20} MiB of memory"))
        return
    threads = min(MAX_THREADS, usable_cores())
    limit_memory(MATCH_BYTES + threads * THREAD_BYTES)
    _send(connection, Compiled(compiler.eos_ids, own_bytes()))

    def begin() -> Output:
        return Output(compiler.begin(order.grammar, compiled), forced)

    _serve(connection, begin, masks, BatchFiller(threads))


def _serve(
    connection: socket.socket, begin: Callable[[], Output], masks: np.ndarray, filler: BatchFiller
) -> None:
    """Answers the frames of the scheduler. `begin` returns a new output of the grammar."""
    outputs: dict[int, Output] = {}
    allowance = Allowance(STEP_BURST_S)
    while frame := connection.recv(protocol.MAX_FRAME):
        message = _decoder.decode(frame)
        if isinstance(message, Open):
            allowance.add(OPEN_RATE_S)
        else:
            masked = sum(1 + len(row.drafts) for row in message.rows)
            allowance.add(STEP_RATE_S + ROW_RATE_S * masked)
        for key in message.closed:
            outputs.pop(key, None)
        begun = time.process_time()
        with cpu_limit(allowance.left):
            if isinstance(message, Open):
                output = outputs.get(message.key) or begin()
                outputs[message.key] = output
                allowed = all(output.accept(token) for token in message.tokens)
                answer: Frame = (
                    Opened() if allowed else Refused("does not allow what was generated before")
                )
            else:
                answer = _fill(message, outputs, masks, filler)
        allowance.spend(time.process_time() - begun)
        _send(connection, answer)


def _fill(
    message: Fill, outputs: dict[int, Output], masks: np.ndarray, filler: BatchFiller
) -> Filled:
    strays: list[int] = []
    runs: dict[int, list[int]] = {}
    rows, on_path = [], []
    drafted: list[tuple[Row, Output]] = []
    for row in message.rows:
        output = outputs[row.key]
        if not all(output.accept(token) for token in row.tokens):
            strays.append(row.key)
            masks[row.row] = 0
        elif output.run:
            runs[row.key] = list(output.run)
            _allow_only(output.run[0], masks[row.row])
        else:
            rows.append(row.row)
            on_path.append(output.matcher)
            if row.drafts:
                drafted.append((row, output))
    filler.fill(on_path, masks, rows)
    return Filled(strays, runs, _fill_after_drafts(drafted, masks, filler))


def _fill_after_drafts(
    drafted: list[tuple[Row, Output]], masks: np.ndarray, filler: BatchFiller
) -> dict[int, int]:
    """Writes the masks after the drafts of each row. Returns `Filled.counts`."""
    counts = {row.key: 1 for row, _ in drafted}
    going, rank = drafted, 0
    while going:
        further: list[tuple[Row, Output]] = []
        rows, on_path = [], []
        for row, output in going:
            if not output.accept_draft(row.drafts[rank]) or output.matcher.is_terminated:
                continue
            counts[row.key] += 1
            at = row.row + rank + 1
            if output.run:
                _allow_only(output.run[0], masks[at])
                continue
            rows.append(at)
            on_path.append(output.matcher)
            if rank + 1 < len(row.drafts):
                further.append((row, output))
        filler.fill(on_path, masks, rows)
        going, rank = further, rank + 1
    for _, output in drafted:
        output.drop_drafts()
    return counts


def _allow_only(token: int, mask: np.ndarray) -> None:
    """Writes `mask` [ceil(vocab / 32)] int32, which allows only `token`."""
    mask[:] = 0
    mask.view(np.uint8)[token // 8] = 1 << token % 8


@contextmanager
def _ended_by_close(connection: socket.socket) -> Iterator[None]:
    """Within the block SIGIO ends the process if the other end of `connection` is closed, even in a loop in C++.

    The other end must not send a frame in the meantime, because it would end the process as well.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        try:
            if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                os._exit(0)  # it was closed before
        except BlockingIOError:
            pass  # open, without a frame
        yield
    finally:
        fcntl.fcntl(connection, fcntl.F_SETFL, flags)


def _send(connection: socket.socket, answer: Frame) -> None:
    try:
        connection.send(_encoder.encode(answer))
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # no request needs this grammar
