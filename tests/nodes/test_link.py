"""The link between nodes: both sides prove the key, and no frame can be forged, changed, repeated or left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mla_router.worker.nodes import link as links
from mla_router.worker.nodes.link import GREETING, Link, LinkError, WrongKeyError
from mla_router.worker.nodes.messages import AnyMessage, Ended, LeaderBeat
from mla_router.worker.nodes.secret import SIZE

KEY = "a secret of the nodes"
EVENT_TIMEOUT_S = 60.0


async def connected(
    client: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]],
    server: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]],
) -> tuple[Any, Any]:
    """Runs both ends of a TCP connection. Returns their results, or the LinkErrors."""
    served: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def end(
        side: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> Any:
        try:
            return await side(reader, writer)
        except LinkError as error:
            return error
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.set_result(await end(server, reader, writer))

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with listener:
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        result = await end(client, reader, writer)
        return result, await asyncio.wait_for(served, EVENT_TIMEOUT_S)


def test_messages_pass_in_both_directions() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AnyMessage:
        link = await Link.connect(reader, writer, KEY)
        link.send(Ended("one"))
        link.send(Ended("two"))
        return await link.receive(EVENT_TIMEOUT_S)

    async def server(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> list[AnyMessage]:
        link = await Link.accept(reader, writer, KEY)
        link.send(LeaderBeat(True, 0.5))
        return [await link.receive(EVENT_TIMEOUT_S) for _ in range(2)]

    got, heard = asyncio.run(connected(client, server))
    assert got == LeaderBeat(True, 0.5)
    assert heard == [Ended("one"), Ended("two")]


def test_another_key_is_refused_by_both_sides() -> None:
    got, heard = asyncio.run(
        connected(
            lambda reader, writer: Link.connect(reader, writer, KEY),
            lambda reader, writer: Link.accept(reader, writer, KEY + "!"),
        )
    )
    assert isinstance(got, WrongKeyError) and isinstance(heard, WrongKeyError)


def test_a_false_node_0_is_not_believed() -> None:
    """It accepts any proof, but has none. It may even send back the proof of the node."""

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + bytes(SIZE))
        sent = await reader.readexactly(2 * SIZE)
        writer.write(sent[SIZE:])
        await reader.read()

    got, _ = asyncio.run(
        connected(lambda reader, writer: Link.connect(reader, writer, KEY), server)
    )
    assert isinstance(got, WrongKeyError)


async def forged(change: Callable[[bytes], bytes]) -> Any:
    """Sends two frames, whose bytes `change` changes. Returns what the other side receives."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = await Link.connect(reader, writer, KEY)
        written: list[bytes] = []
        write, writer.write = writer.write, written.append  # type: ignore[method-assign, assignment]
        link.send(Ended("one"))
        link.send(Ended("two"))
        write(change(b"".join(written)))
        await reader.read()

    async def server(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> list[AnyMessage]:
        link = await Link.accept(reader, writer, KEY)
        return [await link.receive(EVENT_TIMEOUT_S) for _ in range(2)]

    return (await connected(client, server))[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda frames: frames.replace(b"one", b"two"),
        lambda frames: frames[: len(frames) // 2] * 2,  # repeated
        lambda frames: frames[len(frames) // 2 :] + frames[: len(frames) // 2],  # exchanged
        lambda frames: frames[len(frames) // 2 :],  # the first one left out
    ],
)
def test_changed_frames_are_not_believed(change: Callable[[bytes], bytes]) -> None:
    error = asyncio.run(forged(change))
    assert isinstance(error, LinkError) and "changed on its way" in str(error)
    assert asyncio.run(forged(lambda frames: frames)) == [Ended("one"), Ended("two")]


def test_a_large_message_is_not_read() -> None:
    error = asyncio.run(forged(lambda _: (links.MAX_MESSAGE + 1).to_bytes(4, "big")))
    assert isinstance(error, LinkError) and f"{links.MAX_MESSAGE + 1} bytes" in str(error)


def test_a_silent_side_is_an_error() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Link.connect(reader, writer, KEY)
        await reader.read()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AnyMessage:
        return await (await Link.accept(reader, writer, KEY)).receive(0.05)

    _, error = asyncio.run(connected(client, server))
    assert isinstance(error, LinkError) and "silent for 0.05 s" in str(error)


def test_a_node_0_that_does_not_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_UNSENT", 1 << 12)
    done = asyncio.Event()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = await Link.connect(reader, writer, KEY)
        try:
            for _ in range(10_000):
                link.send(Ended("x" * 1000))
        finally:
            done.set()
            writer.transport.abort()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Link.accept(reader, writer, KEY)
        await done.wait()

    error, _ = asyncio.run(connected(client, server))
    assert isinstance(error, LinkError) and "has not read" in str(error)
