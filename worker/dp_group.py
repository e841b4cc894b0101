"""The DP ranks of a group, which share the experts of one model (DP attention): what they inherit from their launcher.

All of it is anonymous memory and socket pairs, and ends with the processes of the group. A group that starts again gets
new ones.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator

import msgspec

from mla_router.worker.heartbeat import Heartbeat

MAX_MESSAGE = 256  # bytes


class DpGroup(msgspec.Struct, frozen=True):
    """Descriptors in the processes of one DP rank."""

    store: int  # memory of the rendezvous of all ranks: `ranks/stores.py`
    heartbeats: int  # of all ranks, by their numbers
    inbox: int  # socket with the messages to this DP rank
    outboxes: list[int]  # socket to each DP rank

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.store, self.heartbeats, self.inbox, *self.outboxes)

    def to_flag(self) -> str:
        return "--dp-group=" + msgspec.json.encode(self).decode()

    @classmethod
    def of_flag(cls, text: str | None) -> DpGroup | None:
        return None if text is None else msgspec.json.decode(text, type=cls)


@contextlib.contextmanager
def dp_groups(size: int) -> Iterator[list[DpGroup]]:
    """Makes what `size` DP ranks inherit, for each of them. The descriptors of this process end with the block."""
    with contextlib.ExitStack() as opened:
        store, heartbeats = os.memfd_create("mla-router-ranks"), Heartbeat.allocate()
        opened.callback(os.close, store)
        opened.callback(os.close, heartbeats)
        # Messages keep their bounds, and all other DP ranks write to the same socket
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(size)]
        for one in (end for pair in pairs for end in pair):
            opened.enter_context(one)
        outboxes = [sending.fileno() for _, sending in pairs]
        yield [DpGroup(store, heartbeats, inbox.fileno(), outboxes) for inbox, _ in pairs]


class Mailbox:
    """The sockets of DP rank `rank`. A process of another DP rank can send until it ends."""

    def __init__(self, group: DpGroup, rank: int) -> None:
        self.rank = rank
        self.size = len(group.outboxes)
        self._inbox = socket.socket(fileno=os.dup(group.inbox))
        self._inbox.setblocking(False)
        others = [fd for number, fd in enumerate(group.outboxes) if number != rank]
        self._outboxes = [socket.socket(fileno=os.dup(fd)) for fd in others]
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)

    def fileno(self) -> int:
        """Returns the descriptor that is readable when a message is here."""
        return self._inbox.fileno()

    def send(self, message: bytes) -> None:
        """Sends to all other DP ranks."""
        for outbox in self._outboxes:
            outbox.send(message)

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """Returns the next message, or None if there is none within `timeout_s` seconds."""
        try:
            return self._inbox.recv(MAX_MESSAGE)
        except BlockingIOError:
            if not timeout_s or not self._poll.poll(int(timeout_s * 1000)):
                return None
        return self._inbox.recv(MAX_MESSAGE)

    def close(self) -> None:
        for one in (self._inbox, *self._outboxes):
            one.close()
