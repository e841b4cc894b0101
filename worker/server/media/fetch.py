"""Fetches images and videos from the domains of --allowed-media-domains, and from no private address.

The addresses of a name are checked when it is resolved, and the connection goes to a checked address: a second look-up
could give another one. Each redirect is checked as the first URL.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from mla_router.worker.server.errors import InvalidField

TIMEOUT_S = 15.0  # of a whole download, redirects included
MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class PrivateAddress(Exception):
    """A name with an address that is not public."""


def is_public(address: str) -> bool:
    """Whether an IP address is of the public internet. One of IPv4 inside IPv6 is the IPv4 address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else None
        found = inner or found.ipv4_mapped or found.sixtofour or found
    return found.is_global and not found.is_multicast


class PublicResolver(AbstractResolver):
    def __init__(self, allows: Callable[[str], bool]) -> None:
        self._allows = allows
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises PrivateAddress unless all addresses of `host` are allowed."""
        found = await self._resolver.resolve(host, port, family)
        if not all(self._allows(address["host"]) for address in found):
            raise PrivateAddress
        return found

    async def close(self) -> None:
        await self._resolver.close()


class Fetcher:
    def __init__(self, domains: Iterable[str], allows: Callable[[str], bool] = is_public) -> None:
        """`domains`: of --allowed-media-domains. `allows`: whether to connect to an IP address."""
        self.domains = frozenset(map(str.lower, domains))
        self._allows = allows

    async def fetch(self, url: str, max_bytes: int, field: str) -> bytes:
        """Returns the body, of at most `most` bytes. Raises InvalidField."""
        try:
            async with asyncio.timeout(TIMEOUT_S), self._session() as session:
                return await self._fetch(session, self._checked(url, field), max_bytes, field)
        except TimeoutError:
            raise InvalidField(field, f"not fetched within {TIMEOUT_S:g} s") from None
        except PrivateAddress:
            raise InvalidField(field, "the domain has an address that is not public") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise InvalidField(field, "cannot be fetched") from None

    async def _fetch(
        self, session: aiohttp.ClientSession, url: URL, max_bytes: int, field: str
    ) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            async with session.get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS and "Location" in response.headers:
                    url = self._checked(str(url.join(URL(response.headers["Location"]))), field)
                    continue
                if response.status != 200:
                    raise InvalidField(field, f"the server answers {response.status}")
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > max_bytes:
                        raise InvalidField(field, f"has more than {max_bytes} bytes")
                return bytes(body)
        raise InvalidField(field, f"more than {MAX_REDIRECTS} redirects")

    def _session(self) -> AbstractAsyncContextManager[aiohttp.ClientSession]:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=PublicResolver(self._allows)),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,  # a small body could become a large one
            trust_env=False,  # a proxy would resolve the name itself
        )

    def _checked(self, text: str, field: str) -> URL:
        """Raises InvalidField unless the URL is one of HTTP at an allowed domain."""
        url = URL(text)
        if url.scheme not in ("http", "https") or url.user is not None:
            raise InvalidField(field, "must be an http, https or data: URL, without a password")
        host = (url.host or "").lower()
        if host not in self.domains:
            raise InvalidField(
                field, "is not of a domain that this server fetches from (--allowed-media-domains)"
            )
        # The resolver sees names only
        if _is_address(host) and not self._allows(host):
            raise PrivateAddress
        return url


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
