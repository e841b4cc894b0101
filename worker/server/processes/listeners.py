"""The worker's port, with one socket for each of its API processes."""

from __future__ import annotations

import dataclasses
import socket
from contextlib import ExitStack

from mla_router.worker.config import WorkerConfig
from mla_router.worker.host import default_server_processes
from mla_router.worker.host_limits import usable_cores

BACKLOG = 1024


def listen(config: WorkerConfig) -> tuple[list[socket.socket], WorkerConfig]:
    """Returns a socket for each API process, and the config with the actual port and number of processes.

    The first socket listens at once, so that no other program can bind the port. The others are only bound: the kernel
    distributes connections among all listening sockets, so an extra API process listens when it can answer. Raises
    OSError if the port is not available.
    """
    count = config.tokenizer_worker_num or default_server_processes(config.device, usable_cores())
    family, _, _, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with ExitStack() as opened:
        first = opened.enter_context(socket.socket(family))
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(address)
        listeners = [first]
        if count > 1:
            # After `bind`: with this option set before, the socket could join a port that another program of this
            # user shares.
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for _ in range(count - 1):
            other = opened.enter_context(socket.socket(family))
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(first.getsockname())
            listeners.append(other)
        first.listen(BACKLOG)
        opened.pop_all()
    port = first.getsockname()[1]
    return listeners, dataclasses.replace(config, port=port, tokenizer_worker_num=count)
