"""The sockets on which the first rank of a worker sends engine calls: one ZMQ PUSH/PULL pair for each other rank, over
ipc.

The sockets are in the private folder of the worker; those of other nodes are in `remote_calls.py`. Only the frames of
`calls.py` pass, in one direction. Sending never blocks: the number of frames in flight is bounded by the steps in flight.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zmq

from mla_router.worker.ranks.calls import MAX_CALL, EngineCall, decode, encode
from mla_router.worker.ranks.remote_calls import RemoteCalls


def rank_socket(folder: Path, rank: int) -> str:
    """Returns the address on which `rank`, counted from the first one of the worker, receives."""
    return f"ipc://{folder}/to_rank_{rank}"


class CallSender:
    """The end of rank 0. For one thread."""

    def __init__(self, folder: Path, size: int, remote: RemoteCalls | None = None) -> None:
        """Connects to the ranks 1 .. `size` - 1. Their sockets must exist. `remote`: the connections to the ranks from
        `size` on, which are on other nodes."""
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.PUSH) for _ in range(1, size)]
        for rank, socket in enumerate(self._sockets, 1):
            socket.setsockopt(zmq.SNDHWM, 0)  # never block or drop
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(rank_socket(folder, rank))
        self._remote = remote

    def send(self, call: EngineCall, bits: np.ndarray | None = None) -> None:
        """Sends a call. `bits`: the token bitmasks of a `Sample`, which ranks on this machine read from memory. Raises
        CallError."""
        if not self._sockets and self._remote is None:
            return
        frame = encode(call)
        if self._remote is not None:  # first, because it takes longer
            self._remote.send(frame, bits)
        for socket in self._sockets:
            socket.send(frame, zmq.NOBLOCK, copy=False)  # the ranks share large frames

    def close(self) -> None:
        self._context.destroy()
        if self._remote is not None:
            self._remote.close()


class CallReceiver:
    """The end of another rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_CALL)
        self._socket.bind(rank_socket(folder, rank))

    def receive(self, timeout_s: float) -> EngineCall | None:
        """Waits up to `timeout_s` seconds for a call. Raises CallError."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return decode(self._socket.recv(zmq.NOBLOCK))

    def close(self) -> None:
        self._context.destroy(linger=0)
