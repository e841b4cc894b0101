"""The DP ranks of a group, which share the experts of one model (DP attention): what they inherit from their launcher.

On one machine all of it is anonymous memory and socket pairs, and ends with the processes of the group. On several nodes
the DP ranks get the location of the store of their rendezvous, and meet there. A group that starts again gets new ones.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from typing import Protocol

import msgspec

from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.nodes.messages import Session

MAX_MESSAGE = 256  # bytes


class DpGroup(msgspec.Struct, frozen=True):
    """Descriptors in the processes of one DP rank, and with several nodes the location of the store."""

    heartbeats: int  # memory of all ranks, by their numbers
    # The store of the rendezvous of all ranks (`ranks/stores.py`): memory, or on node 0 of several the socket
    store: int | None
    inbox: int | None = None  # socket with the messages to this DP rank; None with several nodes
    outboxes: tuple[int, ...] = ()  # socket to each DP rank
    session: Session | None = None  # with several nodes
    address: str = ""  # of this node, for the others

    @property
    def descriptors(self) -> tuple[int, ...]:
        own = (self.heartbeats, self.store, self.inbox, *self.outboxes)
        return tuple(fd for fd in own if fd is not None)

    def to_flag(self) -> str:
        return "--dp-group=" + msgspec.json.encode(self).decode()

    @classmethod
    def of_flag(cls, text: str | None) -> DpGroup | None:
        return None if text is None else msgspec.json.decode(text, type=cls)


@contextlib.contextmanager
def dp_groups(size: int) -> Iterator[list[DpGroup]]:
    """Makes what `size` DP ranks of one machine inherit, for each of them. The descriptors of this process end with the
    block."""
    with contextlib.ExitStack() as opened:
        store, heartbeats = os.memfd_create("mla-router-ranks"), Heartbeat.allocate()
        opened.callback(os.close, store)
        opened.callback(os.close, heartbeats)
        # Messages keep their bounds, and all other DP ranks write to the same socket
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(size)]
        for one in (end for pair in pairs for end in pair):
            opened.enter_context(one)
        outboxes = tuple(sending.fileno() for _, sending in pairs)
        yield [DpGroup(heartbeats, store, inbox.fileno(), outboxes) for inbox, _ in pairs]


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Mailbox(Protocol):
    """The messages between the DP ranks of a group, for one of them. No message is lost or changes its order."""

    rank: int
    size: int

    @property
    def wake(self) -> HasFileno:
        """Is readable for a poller of ZMQ when a message is here."""
        ...

    def send(self, message: bytes) -> None:
        """Sends to all other DP ranks."""
        ...

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """Returns the next message, or None if there is none within `timeout_s` seconds."""
        ...

    def close(self) -> None: ...


class LocalMailbox:
    """Implements `Mailbox` by the sockets of one machine. A process of another DP rank can send until it ends."""

    def __init__(self, group: DpGroup, rank: int) -> None:
        assert group.inbox is not None, "a group of one machine"
        self.rank = rank
        self.size = len(group.outboxes)
        self._inbox = socket.socket(fileno=os.dup(group.inbox))
        self._inbox.setblocking(False)
        others = [fd for number, fd in enumerate(group.outboxes) if number != rank]
        self._outboxes = [socket.socket(fileno=os.dup(fd)) for fd in others]
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)

    @property
    def wake(self) -> HasFileno:
        return self._inbox

    def send(self, message: bytes) -> None:
        for outbox in self._outboxes:
            outbox.send(message)

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        try:
            return self._inbox.recv(MAX_MESSAGE)
        except BlockingIOError:
            if not timeout_s or not self._poll.poll(int(timeout_s * 1000)):
                return None
        return self._inbox.recv(MAX_MESSAGE)

    def close(self) -> None:
        for one in (self._inbox, *self._outboxes):
            one.close()
