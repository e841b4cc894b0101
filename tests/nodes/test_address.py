"""The address and the interface over which nodes talk."""

from __future__ import annotations

import pytest

from mla_router.worker.config import ConfigError
from mla_router.worker.nodes.address import host_port, interface_of, nccl_environment, own_address


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
