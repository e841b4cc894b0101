"""Ports for the workers: the first free ones from a base upwards, as SGLang does."""

from __future__ import annotations

import socket

LAST_PORT = 65535


class NoPortError(RuntimeError):
    """There are not enough free ports from the base upwards."""


def choose_ports(host: str, base: int, count: int, keep_off: frozenset[int]) -> list[int]:
    """`count` ports from `base` upwards that nobody listens on and that are not in `keep_off`."""
    ports: list[int] = []
    for port in range(base, LAST_PORT + 1):
        if len(ports) == count:
            break
        if port not in keep_off and _is_free(host, port):
            ports.append(port)
    if len(ports) < count:
        raise NoPortError(f"{count} free ports are needed from {base} upwards on {host}")
    return ports


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # As the worker's server will do it: a port whose last connections still fade away
        # (TIME_WAIT) is free, one that somebody listens on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
