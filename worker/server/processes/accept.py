"""Accepts the connections of an API process.

asyncio's own servers do not pause at a limit of open files: each attempt fails a thousand times, each time with a traceback
in the log and a timer for another attempt (45 MB of log in 10 s).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from mla_router.worker.server.processes.listeners import BACKLOG

log = logging.getLogger(__name__)

PAUSE_S = 1.0  # after a failure
BURST = 64  # connections that are accepted before other tasks run


async def accept(listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
    """Gives each connection of `listener` a new `protocol` until it is cancelled."""
    loop = asyncio.get_running_loop()
    listener.listen(BACKLOG)
    listener.setblocking(False)
    opening: set[asyncio.Task[object]] = set()
    while True:
        for _ in range(BURST):
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files, or too little memory
                log.warning("cannot accept a connection: %s", error.strerror or error)
                await asyncio.sleep(PAUSE_S)
                continue
            task = loop.create_task(loop.connect_accepted_socket(protocol, connection))
            opening.add(task)
            task.add_done_callback(opening.discard)
        await asyncio.sleep(0)
