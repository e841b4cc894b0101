"""Receives messages of other processes in the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import zmq

log = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")
READS_PER_TURN = 16


class Inbox(Generic[MessageT]):
    """Reads a PULL socket. zmq.asyncio is not used: its futures cost more than the rest of a message."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        decoder: msgspec.msgpack.Decoder[MessageT],
        handle: Callable[[MessageT], None],
    ) -> None:
        """Calls `handle` with each message, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._decoder = decoder
        self._handle = handle

    def start(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._read)

    def stop(self) -> None:
        self._loop.remove_reader(self._socket.fileno())

    def _read(self) -> None:
        # The descriptor is edge-triggered: all messages must be read now. After READS_PER_TURN messages the other
        # callbacks of the event loop get their turn.
        for _ in range(READS_PER_TURN):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(self._decoder.decode(frame))
            except msgspec.MsgspecError as error:
                log.error("dropped a frame that is not a message: %s", error)
        if not self._socket.closed:
            self._loop.call_soon(self._read)
