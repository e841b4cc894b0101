"""An extra API process of a worker. The first API process (`first.py`) starts, drains and stops it. If it dies, the
first API process ends. If the first one hangs for long, an extra one kills it.

Its socket listens only when it can answer, because the kernel distributes connections among all listening sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path

from mla_router.worker.config import EXIT_BAD_SETTINGS
from mla_router.worker.heartbeat_watch import STUCK_FACTOR, until_stuck
from mla_router.worker.messages import Barrier, Drain, PeerQuery, Ping, Stop
from mla_router.worker.server.errors import ENGINE_DIED, ApiError, Unavailable
from mla_router.worker.server.ipc.peers import Peers, join
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient, connect
from mla_router.worker.server.processes.serving import (
    EXIT_FAILED,
    EXIT_STOPPED,
    prepare,
    serving,
)
from mla_router.worker.server.request_names import NamedRequests
from mla_router.worker.server.state import ServerState
from mla_router.worker.server.text.tokenizer import TokenizerError

log = logging.getLogger(__name__)

FIRST = 0  # the number of the first API process


async def run(state: ServerState, number: int, listener: socket.socket, directory: Path) -> int:
    """Serves on `listener` until the first API process stops it. Returns the exit status. `directory` has the
    sockets."""
    async with (
        connect(directory, number, state.shared) as client,
        join(directory, number, state.config.tokenizer_worker_num) as peers,
    ):
        extra = _ExtraProcess(state, client, peers)
        peers.start(extra.answer)
        task = asyncio.create_task(extra.serve(listener))
        stopped = asyncio.create_task(extra.stopped.wait())
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        failure = task.exception() if task.done() and not extra.stopped.is_set() else None
        task.cancel()
        # The last answers go out. A question to the scheduler may have failed at the stop.
        await asyncio.gather(task, return_exceptions=True)
    if failure is None:
        return EXIT_STOPPED
    if not isinstance(failure, TokenizerError | ApiError):
        raise failure
    log.error("%s", failure)
    return EXIT_BAD_SETTINGS if isinstance(failure, TokenizerError) else EXIT_FAILED


class _ExtraProcess:
    def __init__(self, state: ServerState, client: SchedulerClient, peers: Peers) -> None:
        self.stopped = asyncio.Event()
        self._state = state
        self._client = client
        self._peers = peers
        self._names = NamedRequests(client, peers)

    async def serve(self, listener: socket.socket) -> None:
        """Serves until it is cancelled. Raises TokenizerError, ApiError."""
        await self._peers.ask_all(Ping(), timeout=None)
        service = await prepare(self._state, self._client, self._names)
        await self._peers.ask(FIRST, Barrier(), timeout=None)  # all processes can answer
        self._state.service = service
        async with serving(self._state, listener):
            await self._peers.ask(FIRST, Barrier(), timeout=None)  # all processes serve
            first = self._state.own_heartbeat.of_rank(FIRST)
            watchdog_s = self._state.config.watchdog_timeout
            await until_stuck(lambda: [first.age], watchdog_s)
            log.error(
                "the first server process has been stuck for %g seconds, and is ended",
                STUCK_FACTOR * watchdog_s,
            )
            os.kill(first.pid, signal.SIGKILL)  # the others end with it

    async def answer(self, question: PeerQuery) -> int:
        """Answers questions, and obeys `Drain` and `Stop` of the first API process."""
        match question:
            case Drain():
                self._state.draining = True
                await self._client.until_idle()
                return 0
            case Stop(reason):
                self._state.draining = True
                self._client.fail(Unavailable(reason, code=ENGINE_DIED))
                self.stopped.set()
                return 0
            case _:
                return await self._names.answer(question)
