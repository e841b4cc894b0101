"""An authenticated connection between two nodes, over TCP.

Each side proves that it has the secret: it answers the other's random bytes. After that every frame has a tag. Frames are
not encrypted: they have settings and times, and no text of a request.

    handshake   node 0: GREETING, nonce; other: nonce, proof; node 0: proof, or the end of the connection
    frame       size of the message (4 bytes), message (msgpack), tag (32 bytes)
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from typing import Any

import msgspec

from mla_router.worker.nodes.messages import AnyMessage
from mla_router.worker.nodes.secret import SIZE, Seal, derive, equal, nonce

GREETING = b"mla-router nodes 1\n"
HANDSHAKE_S = 10.0
MAX_MESSAGE = 64 << 10
MAX_UNSENT = 1 << 20  # bytes that wait for a node which does not read

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


class LinkError(Exception):
    """The connection has ended, or the other side broke the rules of the link."""


class WrongKeyError(LinkError):
    """The other side has another secret."""


class Link:
    """One side of a connection after the handshake."""

    def __init__(
        self, reader: StreamReader, writer: StreamWriter, sending: Seal, receiving: Seal
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._sending = sending
        self._receiving = receiving

    @classmethod
    async def accept(cls, reader: StreamReader, writer: StreamWriter, secret: str) -> Link:
        """The handshake of node 0. Raises LinkError."""
        own = nonce()
        writer.write(GREETING + own)
        other, proof = await _read(reader, SIZE), await _read(reader, SIZE)
        if not equal(proof, derive(secret, "proof of a node", own, other)):
            raise WrongKeyError("it has another key (MLA_ROUTER_DIST_KEY)")
        writer.write(derive(secret, "proof of node 0", own, other))
        to_node, to_leader = _seals(secret, own, other)
        return cls(reader, writer, to_node, to_leader)

    @classmethod
    async def connect(cls, reader: StreamReader, writer: StreamWriter, secret: str) -> Link:
        """The handshake of another node. Raises LinkError."""
        if await _read(reader, len(GREETING)) != GREETING:
            raise LinkError("it is no mla-router of this version")
        other, own = await _read(reader, SIZE), nonce()
        writer.write(own + derive(secret, "proof of a node", other, own))
        try:
            proof = await reader.readexactly(SIZE)
        except (asyncio.IncompleteReadError, OSError):
            raise WrongKeyError(
                "it refused the key of this node (MLA_ROUTER_DIST_KEY), or has just ended"
            ) from None
        if not equal(proof, derive(secret, "proof of node 0", other, own)):
            raise WrongKeyError("it does not know the key of this node (MLA_ROUTER_DIST_KEY)")
        to_node, to_leader = _seals(secret, other, own)
        return cls(reader, writer, to_leader, to_node)

    def send(self, message: AnyMessage) -> None:
        """Sends without waiting. Raises LinkError if the other side has not read for long."""
        payload = _ENCODER.encode(message)
        assert len(payload) <= MAX_MESSAGE, f"a message of {len(payload)} bytes"
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            raise LinkError(f"it has not read the last {MAX_UNSENT} bytes")
        self._writer.write(len(payload).to_bytes(4, "big") + payload + self._sending.tag(payload))

    async def receive(self, timeout_s: float) -> AnyMessage:
        """Returns the next message. Raises LinkError, also after `timeout_s` seconds without one."""
        try:
            async with asyncio.timeout(timeout_s):
                size = int.from_bytes(await _read(self._reader, 4), "big")
                if size > MAX_MESSAGE:
                    raise LinkError(f"it sent a message of {size} bytes")
                payload, tag = await _read(self._reader, size), await _read(self._reader, SIZE)
        except TimeoutError:
            raise LinkError(f"it was silent for {timeout_s:g} s") from None
        if not equal(tag, self._receiving.tag(payload)):
            raise LinkError("a message was changed on its way")
        try:
            message: AnyMessage = _DECODER.decode(payload)
        except msgspec.DecodeError as error:
            raise LinkError(f"a message that cannot be decoded: {error}") from error
        return message

    async def close(self) -> None:
        """Sends the rest, for a second at most, and ends the connection."""
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()


def _seals(secret: str, leader: bytes, node: bytes) -> tuple[Seal, Seal]:
    """Returns the seals of the frames to the node and of those to node 0. `leader`, `node`: the nonces."""
    return (
        Seal(derive(secret, "frames to a node", leader, node)),
        Seal(derive(secret, "frames to node 0", leader, node)),
    )


async def _read(reader: StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        raise LinkError("the connection has ended") from None
    except OSError as error:
        raise LinkError(f"the connection has ended: {error.strerror or error}") from error
