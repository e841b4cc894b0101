"""The messages between DP ranks on several nodes: ZMQ PUSH/PULL over TCP, encrypted and authenticated by CURVE.

Each DP rank listens on the address of its node for all others. The keys follow from the secret of the nodes and from the
session, as those of engine calls (`remote_calls.py`). Once all others are connected nobody else can connect, and a
connection that ends is not made again: a message would be missing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import zmq

from mla_router.worker.ranks.connection import describe_end, watch
from mla_router.worker.ranks.errors import RanksError
from mla_router.worker.ranks.guard import Guard
from mla_router.worker.ranks.remote_calls import SessionKeys

# Messages that another DP rank has not taken. It is at most a turn behind.
MAX_WAITING = 64
_DOMAIN = "dp-ranks"
_MAX_FRAME = 1024  # bytes; messages are smaller than those of the handshake
# A firewall may drop a connection without traffic
_KEEPALIVE_S = 60


class RemoteMailbox:
    """Implements `Mailbox` for DP rank `rank` of `size` on several nodes."""

    def __init__(self, address: str, rank: int, size: int, keys: SessionKeys) -> None:
        """Listens on `address`, on a free port. `connect` must follow."""
        self.rank = rank
        self.size = size
        self._keys = keys
        self._others = [number for number in range(size) if number != rank]
        self._context = zmq.Context()
        known = [keys.dp_rank(number)[0] for number in self._others]
        self._guard = Guard(self._context, {_DOMAIN: known})
        inbox = self._socket(zmq.PULL, is_v6=":" in address)
        inbox.setsockopt(zmq.RCVHWM, MAX_WAITING * size)
        inbox.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
        self._guard.protect(inbox, _DOMAIN)
        inbox.curve_publickey, inbox.curve_secretkey = keys.dp_rank(rank)
        inbox.bind(f"tcp://{f'[{address}]' if ':' in address else address}:*")
        self._inbox = inbox
        self._outboxes: dict[int, zmq.Socket[bytes]] = {}
        # Sockets that are readable when the connection to a DP rank has ended, and the rank
        self._ends: dict[zmq.Socket[bytes], int] = {}
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)

    @property
    def endpoint(self) -> str:
        """The address for the other DP ranks."""
        return self._inbox.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @property
    def wake(self) -> zmq.Socket[bytes]:
        return self._inbox

    def connect(self, endpoints: Mapping[int, str], timeout_s: float) -> None:
        """Connects to all other DP ranks, and waits until they are connected to this one. Raises RanksError.

        No DP rank sends other messages before all have returned from this.
        """
        for number in self._others:
            outbox = self._socket(zmq.PUSH, is_v6="[" in endpoints[number])
            outbox.setsockopt(zmq.SNDHWM, MAX_WAITING)
            outbox.curve_serverkey = self._keys.dp_rank(number)[0]
            outbox.curve_publickey, outbox.curve_secretkey = self._keys.dp_rank(self.rank)
            self._ends[end := watch(outbox)] = number
            self._poller.register(end, zmq.POLLIN)
            outbox.connect(endpoints[number])
            self._outboxes[number] = outbox
        self.send(self.rank.to_bytes())
        deadline = time.monotonic() + timeout_s
        missing = set(self._others)
        while missing:
            left_s = deadline - time.monotonic()
            message = self.receive(left_s) if left_s > 0 else None
            if message is None:
                names = " and ".join(f"DP rank {number}" for number in sorted(missing))
                raise RanksError(
                    f"after {timeout_s:g} s (--dist-timeout) {names} "
                    f"{'has' if len(missing) == 1 else 'have'} not connected to {self.endpoint} of DP rank {self.rank}"
                )
            missing.discard(int.from_bytes(message))
        self._guard.stop()

    def send(self, message: bytes) -> None:
        """Raises RanksError if a DP rank takes no messages."""
        for number, outbox in self._outboxes.items():
            try:
                outbox.send(message, zmq.NOBLOCK)
            except zmq.Again as error:
                raise RanksError(
                    f"DP rank {number} takes no messages: its connection has ended, or it is {MAX_WAITING} messages late"
                ) from error

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """Raises RanksError if a connection has ended."""
        try:
            return self._inbox.recv(zmq.NOBLOCK)
        except zmq.Again:
            if not timeout_s:
                return None
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._inbox in ready:
            return self._inbox.recv(zmq.NOBLOCK)
        for end in ready:
            raise RanksError(f"the connection to DP rank {self._ends[end]} {describe_end(end)}")
        return None

    def close(self) -> None:
        self._guard.stop()
        for outbox in self._outboxes.values():
            outbox.disable_monitor()
        self._context.destroy(linger=0)

    def _socket(self, kind: int, *, is_v6: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, is_v6)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
        return socket
