"""The worker's port, and a socket on it for each of its server processes."""

from __future__ import annotations

import dataclasses
import os
import socket
from contextlib import ExitStack

from mla_router.worker.config import WorkerConfig, default_server_processes

BACKLOG = 1024


def listen(config: WorkerConfig) -> tuple[list[socket.socket], WorkerConfig]:
    """A socket for each server process, and the config with the port and the number of processes that
    were left open. OSError if the port cannot be had.

    The kernel deals connections out to those that listen. The first does, at once: until then, another
    program could bind the port, too. The others are bound only, for a process to listen on when it can
    answer: a connection that was dealt to it before would wait.
    """
    count = config.tokenizer_worker_num or default_server_processes(
        config.device, len(os.sched_getaffinity(0))
    )
    family, _, _, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with ExitStack() as opened:
        first = opened.enter_context(socket.socket(family))
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(address)
        listeners = [first]
        if count > 1:
            # Only now: a socket that had this option before would share the port of any other program of
            # this user that has it.
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
