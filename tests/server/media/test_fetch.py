"""Downloads from real sockets: allowed domains, private addresses, redirects and limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from mla_router.worker.config import WorkerConfig
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.media import fetch
from mla_router.worker.server.media.fetch import Fetcher, is_public

FIELD = "messages[0].content[0].image_url"


@asynccontextmanager
async def site() -> AsyncIterator[int]:
    """Serves on 127.0.0.1, and yields the port."""

    async def answer(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/good":
                return web.Response(body=b"picture")
            case "/gone":
                return web.Response(status=404)
            case "/moved":
                return web.Response(status=302, headers={"Location": request.query["to"]})
            case "/loop":
                return web.Response(status=308, headers={"Location": "loop"})
            case "/slow":
                await asyncio.sleep(60)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(10_000):
            await response.write(bytes(1000))
        return response

    app = web.Application()
    app.router.add_get("/{path}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    server = web.TCPSite(runner, "127.0.0.1", 0)
    await server.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def get(
    path: str, *, domains: str = "localhost", allows: Callable[[str], bool] = lambda _: True
) -> bytes:
    """Returns the bytes of `path`, in which PORT is the port of the site."""

    async def run() -> bytes:
        async with site() as port:
            url = path.replace("PORT", str(port))
            named = WorkerConfig(allowed_media_domains=domains).media_domains
            return await Fetcher(named, allows).fetch(url, 5000, FIELD)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "path",
    [
        "http://localhost:PORT/good",
        "HTTP://LOCALHOST:PORT/good",
        "http://localhost:PORT/moved?to=/good",
        "http://localhost:PORT/moved?to=http%3A//localhost:PORT/good",
    ],
)
def test_allowed(path: str) -> None:
    assert get(path, domains="example.org, localhost") == b"picture"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("http://127.0.0.1:PORT/good", "not of a domain"),
        ("http://localhost.example.org:PORT/good", "not of a domain"),
        ("http://localhost@example.org/good", "without a password"),
        ("ftp://localhost/good", "must be an http"),
        ("file:///etc/passwd", "must be an http"),
        ("http:///good", "not of a domain"),
        ("http://localhost:99999/good", "cannot be fetched"),
        ("http://localhost:PORT/moved?to=http%3A//127.0.0.1:PORT/good", "not of a domain"),
        ("http://localhost:PORT/moved?to=file%3A///etc/passwd", "must be an http"),
        ("http://localhost:PORT/loop", "more than 3 redirects"),
        ("http://localhost:PORT/gone", "the server answers 404"),
        ("http://localhost:PORT/endless", "has more than 5000 bytes"),
        ("http://localhost:1/good", "cannot be fetched"),
    ],
)
def test_refused(path: str, message: str) -> None:
    with pytest.raises(InvalidField, match=message) as caught:
        get(path)
    assert caught.value.body.error.param == FIELD


def test_an_allowed_domain_with_a_private_address() -> None:
    with pytest.raises(InvalidField, match="an address that is not public"):
        get("http://localhost:PORT/good", allows=is_public)


def test_an_allowed_address_that_is_private() -> None:
    with pytest.raises(InvalidField, match="an address that is not public"):
        get("http://127.0.0.1:PORT/good", domains="127.0.0.1", allows=is_public)


def test_a_redirect_to_a_private_address() -> None:
    """The first domain has an allowed address, the second one has not."""

    def allows(address: str) -> bool:
        return address != "127.0.0.1" or next(asked) == 0

    asked = iter(range(10))
    with pytest.raises(InvalidField, match="not public"):
        get(
            "http://localhost:PORT/moved?to=http%3A//127.0.0.1:PORT/good",
            domains="localhost,127.0.0.1",
            allows=allows,
        )


def test_one_private_address_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that also has a public address is refused as well."""

    async def resolve(_: object, host: str, port: int, family: int) -> list[object]:
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": family,
                "proto": 6,
                "flags": 0,
            }
            for address in ("93.184.215.14", "127.0.0.1")
        ]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    with pytest.raises(InvalidField, match="not public"):
        get("http://localhost:PORT/good", allows=is_public)


def test_a_slow_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "TIMEOUT_S", 0.2)
    with pytest.raises(InvalidField, match=r"not fetched within 0\.2 s"):
        get("http://localhost:PORT/slow")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001:0:7f00:1::",
        "ff02::1",
    ],
)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:4700::1", "64:ff9b::5db8:d70e"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)
