"""Who may send a request: its key, or, where none is asked for, the web page that it comes from."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket

from aiohttp import web

from mla_router.worker.config import WorkerConfig
from mla_router.worker.server.errors import Forbidden, Unauthorized

# Methods that change nothing.
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def check_access(config: WorkerConfig, request: web.Request, *, for_admins: bool) -> None:
    """Raise Unauthorized (401) or Forbidden (403). Paths for admins want the admin's key, if there is one."""
    keys = [key for key in (config.api_key, config.admin_api_key) if key]
    if for_admins and config.admin_api_key:
        keys = [config.admin_api_key]
    elif not config.api_key:
        check_page(config, request)
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    # Hashed first: comparing takes the same time however long and however wrong the key is. All are compared.
    same = [hmac.compare_digest(_digest(given.strip()), _digest(key)) for key in keys]
    if scheme.lower() != "bearer" or not any(same):
        raise Unauthorized("Wrong or missing API key", code="invalid_api_key")


def check_page(config: WorkerConfig, request: web.Request) -> None:
    """Refuse requests that a web page of another site has made its reader's browser send."""
    host = request.headers.get("Host", "")
    name = _name(host)
    if _is_loopback(config.host) and name and not _is_own(name, config.host):
        # A site's name may come to mean 127.0.0.1 (DNS rebinding): then its pages are of our own origin.
        raise Forbidden(
            f"This worker is not addressed as {name[:200]}, but by an address or as localhost",
            code="host_not_allowed",
        )
    origin = request.headers.get("Origin")
    if origin is not None:
        foreign = origin.partition("://")[2].lower() != host.lower()
    else:
        site = request.headers.get("Sec-Fetch-Site", "none")
        foreign = request.method not in SAFE and site not in ("none", "same-origin")
    if foreign:
        raise Forbidden(
            "Web pages of other sites may not send this request; they may use a router, by its "
            "--cors-allowed-origins",
            code="origin_not_allowed",
        )


def _name(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_own(name: str, own: str) -> bool:
    is_localhost = name == "localhost" or name.endswith(".localhost")
    return is_localhost or _is_address(name) or name in (own.lower(), socket.gethostname().lower())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
