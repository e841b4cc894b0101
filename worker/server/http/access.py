"""Access control: API keys, or, without a configured key, the origin of web pages."""

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
    """Raises Unauthorized (401) or Forbidden (403). Admin paths need the admin key, if one is configured."""
    keys = [key for key in (config.api_key, config.admin_api_key) if key]
    if for_admins and config.admin_api_key:
        keys = [config.admin_api_key]
    elif not config.api_key:
        check_page(config, request)
        return
    given = _key_of(request)
    # The digests have equal lengths, and all keys are compared, so the time reveals nothing about the keys.
    same = [hmac.compare_digest(_digest(given), _digest(key)) for key in keys]
    if not any(same):
        raise Unauthorized("Wrong or missing API key", code="invalid_api_key")


def _key_of(request: web.Request) -> str:
    """Returns the key in the form of OpenAI's clients or of Anthropic's; empty without a key."""
    if "Authorization" not in request.headers:
        return request.headers.get("x-api-key", "")
    scheme, _, key = request.headers["Authorization"].partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def check_page(config: WorkerConfig, request: web.Request) -> None:
    """Raises Forbidden for requests from web pages of other sites."""
    host = request.headers.get("Host", "")
    name = _name(host)
    if _is_loopback(config.host) and name and not _is_own(name, config.host):
        # DNS rebinding: if a foreign name resolves to 127.0.0.1, its pages have the worker's own origin.
        shown = name[:200].encode(errors="replace").decode()  # JSON has no other bytes than UTF-8
        raise Forbidden(
            f"The Host {shown} is not allowed; address this worker as localhost or by its IP address",
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
            "Web pages of other sites may not send this request; use a router with "
            "--cors-allowed-origins",
            code="origin_not_allowed",
        )


def _name(host: str) -> str:
    """Returns the host name or address of a Host header, without its port."""
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
