"""The address and the interface over which nodes talk."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from mla_router.worker.config import ConfigError, with_port
from mla_router.worker.nodes import address
from mla_router.worker.nodes.address import (
    host_port,
    interface_of,
    nccl_environment,
    own_address,
    resolve_in_time,
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("10.0.0.1:5000", ("10.0.0.1", 5000)),
        ("node-0.example:1", ("node-0.example", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_host_and_port(text: str, parts: tuple[str, int]) -> None:
    assert host_port(text) == parts
    assert with_port(*parts) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":5", "host:0", "host:65536", "::1:5", "a b"]
)
def test_other_texts_are_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        host_port(text)


def test_the_interface_of_an_address() -> None:
    assert own_address("127.0.0.1", 9) == "127.0.0.1"
    assert interface_of("127.0.0.1") == interface_of("::1") == "lo"
    # An address for documentation, which no machine has
    assert interface_of("192.0.2.1") is None
    assert nccl_environment("127.0.0.1", "cuda") == {"NCCL_SOCKET_IFNAME": "lo"}
    assert nccl_environment("192.0.2.1", "cpu") == {}
    with pytest.raises(ConfigError, match="NCCL_SOCKET_IFNAME"):
        nccl_environment("192.0.2.1", "cuda")


def test_a_name_may_become_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked, warned = socket.getaddrinfo, [], []

    def getaddrinfo(host: str, port: int, **kind: Any) -> Any:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", port, **kind)

    monkeypatch.setattr(address, "RETRY_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    found = asyncio.run(resolve_in_time("pod-0.pods", 9, 60.0, warned.append))
    assert found == (socket.AF_INET, "127.0.0.1")
    assert asked == ["pod-0.pods"] * 3
    assert warned == ["pod-0.pods (--dist-init-addr): Name or service not known; trying again"]


def test_an_unknown_name_is_an_error_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(address, "RETRY_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(OSError, match="not known"):
        asyncio.run(resolve_in_time("pod-0.pods", 9, 0.05, lambda _: None))
