"""The sockets of engine calls to ranks on other nodes: ZMQ PUSH/PULL over TCP, encrypted and authenticated by CURVE.

The keys follow from the secret of the nodes and from the session, so only processes of this start can take part. Rank 0
listens on one address, and refuses all connections once the other ranks are connected. A connection that ends is not made
again: calls would be missing.

Nodes share no memory: the token bitmasks of a `Sample` are a second part of its frame.
"""

from __future__ import annotations

import time

import numpy as np
import zmq
from zmq.utils import z85

from mla_router.worker.mask_memory import MaskMemory
from mla_router.worker.nodes.secret import derive
from mla_router.worker.ranks.calls import MAX_CALL, EngineCall, Sample, decode
from mla_router.worker.ranks.connection import describe_end, watch
from mla_router.worker.ranks.errors import CallError, RanksError
from mla_router.worker.ranks.guard import Guard

# Calls that a rank has not taken. Rank 0 is at most a few steps ahead of a rank that exchanges with it.
MAX_WAITING = 64


class SessionKeys:
    """The CURVE keys of one start: of engine calls, and of the messages between DP ranks."""

    def __init__(self, secret: str, session: str) -> None:
        self._secret = secret
        self._session = session.encode()

    def leader(self) -> tuple[bytes, bytes]:
        """Returns public and secret key of rank 0."""
        return self._pair("calls of rank 0")

    def rank(self, rank: int) -> tuple[bytes, bytes]:
        """Returns public and secret key of another rank."""
        return self._pair(f"calls to rank {rank}")

    def dp_rank(self, dp_rank: int) -> tuple[bytes, bytes]:
        """Returns public and secret key of a DP rank."""
        return self._pair(f"messages of DP rank {dp_rank}")

    def _pair(self, purpose: str) -> tuple[bytes, bytes]:
        secret = z85.encode(derive(self._secret, purpose, self._session))
        return zmq.curve_public(secret), secret


class RemoteCalls:
    """The end of rank 0: a socket for each rank on another node."""

    def __init__(self, address: str, ranks: range, keys: SessionKeys) -> None:
        """Listens on `address`, on a free port for each of `ranks`."""
        self._context = zmq.Context()
        domains = {rank: f"rank-{rank}" for rank in ranks}
        known = {domain: [keys.rank(rank)[0]] for rank, domain in domains.items()}
        self._guard = Guard(self._context, known)  # until all ranks are connected
        sockets: dict[int, zmq.Socket[bytes]] = {}
        host = f"[{address}]" if ":" in address else address
        for rank in ranks:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.IPV6, ":" in address)
            socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
            socket.setsockopt(zmq.LINGER, 0)
            self._guard.protect(socket, domains[rank])
            socket.curve_publickey, socket.curve_secretkey = keys.leader()
            socket.bind(f"tcp://{host}:*")
            sockets[rank] = socket
        self._sockets = tuple(sockets.items())

    @property
    def endpoints(self) -> dict[int, str]:
        """The addresses for `RemoteReceiver`, by rank."""
        return {
            rank: socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
            for rank, socket in self._sockets
        }

    def wait_connected(self, timeout_s: float) -> None:
        """Waits until all ranks are connected. Nobody else can connect later. Raises RanksError."""
        deadline = time.monotonic() + timeout_s
        for rank, socket in self._sockets:
            if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000)), zmq.POLLOUT):
                raise RanksError(
                    f"after {timeout_s:g} s (--dist-timeout) rank {rank} has not connected to {self.endpoints[rank]}, where "
                    f"rank 0 sends engine calls"
                )
        self._guard.stop()

    def send(self, frame: bytes, bits: np.ndarray | None) -> None:
        """Sends a call, and the bitmasks [rows, words] of a `Sample`. Raises CallError if a rank does not take it."""
        # A copy of the bitmasks: their memory is used again three steps later.
        parts = [frame] if bits is None else [frame, bits.astype("<i4").tobytes()]
        for rank, socket in self._sockets:
            try:
                socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
            except zmq.Again as error:
                raise CallError(
                    f"rank {rank} takes no calls: its connection has ended, or it is {MAX_WAITING} calls late"
                ) from error

    def close(self) -> None:
        self._guard.stop()
        self._context.destroy(linger=0)


class RemoteReceiver:
    """The end of another rank, as `CallReceiver`."""

    def __init__(self, endpoint: str, rank: int, keys: SessionKeys, masks: MaskMemory) -> None:
        """`masks`: memory of this rank for the bitmasks of the calls."""
        self._masks = masks
        self._context = zmq.Context()
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_CALL)
        socket.curve_serverkey = keys.leader()[0]
        socket.curve_publickey, socket.curve_secretkey = keys.rank(rank)
        self._events = watch(socket)
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)
        socket.connect(endpoint)

    def receive(self, timeout_s: float) -> EngineCall | None:
        """Waits up to `timeout_s` seconds for a call. Raises CallError, also if the connection has ended."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._socket in ready:
            return self._read(*self._socket.recv_multipart(zmq.NOBLOCK))
        if self._events in ready:
            raise CallError(f"the connection for the calls of rank 0 {describe_end(self._events)}")
        return None

    def _read(self, frame: bytes, *bits: bytes) -> EngineCall:
        call = decode(frame)
        wanted = isinstance(call, Sample) and call.masks is not None
        if len(bits) != wanted:
            raise CallError(f"a {type(call).__name__} with {len(bits)} parts of bitmasks")
        if isinstance(call, Sample) and call.masks is not None:
            try:
                self._masks.put(call.masks.step, bits[0])
            except ValueError as error:
                raise CallError(str(error)) from error
        return call

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
