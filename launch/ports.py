"""Chooses the ports of the workers: the first free ones from a base upwards, as SGLang does.

A worker listens seconds after its port was chosen, and again after every restart. In the meantime another launcher must
not choose the same port. So a chosen port is claimed by an abstract Unix socket with its name, which leaves no file and
ends with its process.
"""

from __future__ import annotations

import socket
from types import TracebackType

LAST_PORT = 65535


class NoPortError(RuntimeError):
    """There are not enough free ports from the base upwards."""


class ClaimedPorts:
    """Claims `count` ports of the numeric address `host`, from `base` upwards, until the end of the block.

    The ports are free, no other launcher has claimed them, and none is in `keep_off`. Raises NoPortError.
    """

    def __init__(self, host: str, base: int, count: int, keep_off: frozenset[int]) -> None:
        self._claims: dict[int, socket.socket] = {}
        for port in range(base, LAST_PORT + 1):
            if len(self._claims) == count:
                return
            if port not in keep_off and _is_free(host, port) and (claim := _claim(port)):
                self._claims[port] = claim
        if len(self._claims) < count:
            self.close()
            raise NoPortError(f"{count} free ports are needed from {base} upwards on {host}")

    def __enter__(self) -> list[int]:
        return list(self._claims)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for claim in self._claims.values():
            claim.close()


def _claim(port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0mla-router-worker-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # The same option as in the worker: a port with old connections in TIME_WAIT is free, one with a listener is
        # not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
