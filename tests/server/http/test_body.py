"""Reading of bodies over real sockets: framing, pauses and size."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from mla_router.worker.config import SMALL_MODEL, WorkerConfig
from mla_router.worker.server.app import errors
from mla_router.worker.server.http import body as body_module
from mla_router.worker.server.http.body import read_body
from mla_router.worker.server.http.turns import TURNS, Turns
from mla_router.worker.server.state import STATE, ServerState

LIMIT = 1024


@asynccontextmanager
async def echo() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connects to an application that answers with the length of its body."""

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(len(await read_body(request)))

    app = web.Application(middlewares=[errors], client_max_size=LIMIT)
    app[STATE] = ServerState(WorkerConfig(str(SMALL_MODEL), max_payload_size=LIMIT))
    app[TURNS] = Turns()
    app.router.add_post("/", handler)
    runner = web.AppRunner(app, lingering_time=0)  # no wait after the answer
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await runner.cleanup()


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


def head(*lines: str) -> bytes:
    return "\r\n".join(["POST / HTTP/1.1", "Host: x", *lines, "", ""]).encode()


@pytest.mark.parametrize("size", [0, 1, LIMIT])
def test_a_body_in_pieces(size: int) -> None:
    async def send() -> tuple[int, Any]:
        async with echo() as (reader, writer):
            writer.write(head(f"Content-Length: {size}"))
            for _ in range(size):
                writer.write(b"x")
                await asyncio.sleep(0)  # the server may read before the next byte
            return await answer(reader)

    assert asyncio.run(send()) == (200, size)


def test_a_client_that_goes_while_it_sends(caplog: pytest.LogCaptureFixture) -> None:
    """It is a line of the access log and not an error."""
    caplog.set_level("INFO")

    async def send() -> str:
        async with echo() as (_, writer):
            writer.write(head("Content-Length: 10") + b"xyz")
            await writer.drain()
            writer.close()
            while not (lines := [r for r in caplog.records if r.name == "aiohttp.access"]):
                await asyncio.sleep(0.01)
            return lines[0].getMessage()

    assert '" 499 ' in asyncio.run(asyncio.wait_for(send(), 10))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_body_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "STALLED_S", 0.05)

    async def send() -> tuple[int, Any]:
        async with echo() as (reader, writer):
            writer.write(head("Content-Length: 10") + b"xyz")
            return await answer(reader)

    status, body = asyncio.run(send())
    assert status == 408
    assert "after 3 bytes" in body["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit(announced: bool) -> None:
    async def send() -> tuple[int, Any]:
        async with echo() as (reader, writer):
            if announced:
                writer.write(head(f"Content-Length: {LIMIT + 1}") + b"x" * (LIMIT + 1))
            else:
                writer.write(head("Transfer-Encoding: chunked"))
                writer.write(b"200\r\n" + b"x" * 512 + b"\r\n")
                writer.write(b"201\r\n" + b"x" * 513 + b"\r\n")
            return await answer(reader)

    status, body = asyncio.run(send())
    assert status == 413
    assert set(body) == {"error"}


def test_a_small_body_that_unpacks_to_a_large_one() -> None:
    packed = gzip.compress(b"x" * 10_000)
    assert len(packed) < 100

    async def send() -> tuple[int, Any]:
        async with echo() as (reader, writer):
            writer.write(head(f"Content-Length: {len(packed)}", "Content-Encoding: gzip") + packed)
            return await answer(reader)

    assert asyncio.run(send())[0] == 413
