"""The scheduler's sockets to its server processes: msgpack over ZMQ ipc sockets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from mla_router.worker.dp_group import HasFileno
from mla_router.worker.messages import (
    ToScheduler,
    ToServer,
    scheduler_socket,
    server_socket,
)

logger = logging.getLogger(__name__)

# Maximum numbers of messages and bytes of one `receive`: the running requests wait for it. A flood of arrivals, or of
# long prompts, is taken over several steps.
MAX_MESSAGES = 64
MAX_BYTES = 256 << 10


class Channel(Protocol):
    """Receives and sends the scheduler's messages. Tests use one without sockets."""

    num_servers: int

    def receive(self, timeout_s: float) -> list[ToScheduler]: ...

    def send(self, message: ToServer, server: int | None = None) -> None:
        """Sends to one server, or to all of them by default."""


class ZmqChannel:
    """Receives by a PULL socket, and sends by a PUSH socket to each server."""

    def __init__(self, folder: Path, num_servers: int = 1, wake: HasFileno | None = None) -> None:
        """`folder` holds the sockets and must be private to the user. `wake`: ends a wait for messages when it is
        readable."""
        self.num_servers = num_servers
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outboxes = [self._context.socket(zmq.PUSH) for _ in range(num_servers)]
        for socket in (self._inbox, *self._outboxes):
            # In ms; the servers do not wait longer for a scheduler that exits
            socket.setsockopt(zmq.LINGER, 100)
            # Never block or drop: the servers limit their requests
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(scheduler_socket(folder))
        self._arrivals = zmq.Poller()
        self._arrivals.register(self._inbox, zmq.POLLIN)
        if wake is not None:
            self._arrivals.register(wake, zmq.POLLIN)
        for server, outbox in enumerate(self._outboxes):
            outbox.connect(server_socket(folder, server))
        self._decoder = msgspec.msgpack.Decoder(ToScheduler)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, timeout_s: float) -> list[ToScheduler]:
        """Returns the messages that have arrived, up to MAX_MESSAGES and about MAX_BYTES. Waits up to `timeout_s` seconds
        for the first."""
        messages: list[ToScheduler] = []
        if timeout_s > 0 and not self._arrivals.poll(int(timeout_s * 1000)):
            return messages
        left = MAX_BYTES
        while left > 0 and len(messages) < MAX_MESSAGES:
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            left -= len(frame)
            try:
                messages.append(self._decoder.decode(frame))
            except msgspec.DecodeError as error:
                logger.error("dropped a message that cannot be decoded: %s", error)
        return messages

    def send(self, message: ToServer, server: int | None = None) -> None:
        frame = self._encoder.encode(message)
        for outbox in self._outboxes if server is None else (self._outboxes[server],):
            outbox.send(frame)

    def close(self) -> None:
        self._inbox.close()
        for outbox in self._outboxes:
            outbox.close()
        self._context.term()
