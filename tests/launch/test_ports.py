from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from mla_router.launch.ports import LAST_PORT, ClaimedPorts, NoPortError
from support.processes import free_ports

LOCAL = "127.0.0.1"


def choose_ports(host: str, base: int, count: int, keep_off: frozenset[int]) -> list[int]:
    with ClaimedPorts(host, base, count, keep_off) as ports:
        return ports


@pytest.fixture
def taken() -> Iterator[int]:
    """A port with a listener during the test."""
    with socket.create_server((LOCAL, 0)) as server:
        yield server.getsockname()[1]


def test_ports_follow_the_base() -> None:
    (base,) = free_ports(1)
    first, second = choose_ports(LOCAL, base, 2, keep_off=frozenset())
    assert first == base
    assert second > base


def test_ports_of_an_ipv6_address() -> None:
    (base,) = free_ports(1)
    with socket.create_server(("::1", base), family=socket.AF_INET6):
        (port,) = choose_ports("::1", base, 1, keep_off=frozenset())
        assert port > base


def test_a_taken_port_is_passed_over(taken: int) -> None:
    ports = choose_ports(LOCAL, taken, 2, keep_off=frozenset())
    assert taken not in ports
    assert ports == sorted(set(ports))


def test_a_reserved_port_is_passed_over() -> None:
    (base,) = free_ports(1)
    assert base not in choose_ports(LOCAL, base, 1, keep_off=frozenset({base}))


def test_a_port_in_time_wait_is_free() -> None:
    (port,) = free_ports(1)
    with socket.create_server((LOCAL, port)) as server:
        client = socket.create_connection((LOCAL, port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first stays in TIME_WAIT
        assert client.recv(1) == b""
        client.close()
    assert choose_ports(LOCAL, port, 1, keep_off=frozenset()) == [port]


def test_no_ports_left(taken: int) -> None:
    with pytest.raises(NoPortError, match="2 free ports are needed from 65535 upwards"):
        choose_ports(LOCAL, LAST_PORT, 2, keep_off=frozenset({taken}))


def test_two_launchers_never_choose_the_same_port() -> None:
    (base,) = free_ports(1)
    with ClaimedPorts(LOCAL, base, 2, frozenset()) as mine:
        with ClaimedPorts(LOCAL, base, 2, frozenset()) as theirs:
            assert not set(mine) & set(theirs)
        assert mine[0] == base
    assert choose_ports(LOCAL, base, 1, frozenset()) == [base]  # the claim ended with its process
