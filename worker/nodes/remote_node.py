"""Another node as node 0 sees it after the handshake: its beats, the states of its ranks, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.nodes.link import Link, LinkError
from mla_router.worker.nodes.messages import Ended, LeaderBeat, NodeBeat

BEAT_S = 0.25
EXIT_NODE_ENDED = 3

log = logging.getLogger(__name__)


class RemoteNode:
    """A node other than 0. `wait`, `kill` and `is_running` are those of a child process."""

    def __init__(self, number: int, ranks: range, heartbeats: Sequence[Heartbeat]) -> None:
        """`heartbeats`: the pages of its ranks on this machine."""
        self.number = number
        self.ranks = ranks
        self.name = node_name(number, ranks)
        self.has_come = False
        self._pages = heartbeats
        self._frozen: set[int] = set()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """Waits for the end of the node. Returns an exit status."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Ends the connection. The other side then kills its ranks."""
        self.end(EXIT_NODE_ENDED)

    def end(self, status: int) -> None:
        if not self._ended.done():
            self._ended.set_result(status)

    @property
    def is_running(self) -> bool:
        return not self._ended.done()

    async def serve(self, link: Link, beat: Callable[[], LeaderBeat], timeout_s: float) -> None:
        """Exchanges beats until one side ends. `beat` returns the next one of node 0. `timeout_s`: longest silence."""
        receiving = asyncio.create_task(self._receive(link, timeout_s))
        sending = asyncio.create_task(_send_beats(link, beat))
        ending = asyncio.create_task(self.wait())
        tasks: tuple[asyncio.Task[Any], ...] = (receiving, sending, ending)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in (receiving, sending):
                if task.done():
                    task.result()
        except LinkError as error:
            log.error("%s is lost: %s", self.name, error)
        finally:
            for task in tasks:
                task.cancel()
            self.end(EXIT_NODE_ENDED)

    async def _receive(self, link: Link, timeout_s: float) -> None:
        while True:
            message = await link.receive(timeout_s)
            if isinstance(message, Ended):
                log.error("%s has ended: %s", self.name, message.reason)
                return
            if not isinstance(message, NodeBeat) or len(message.ranks) != len(self.ranks):
                raise LinkError("a message that does not belong here")
            for rank, page, state in zip(self.ranks, self._pages, message.ranks, strict=True):
                page.report(state.age_s, is_frozen=state.is_frozen)
                self._tell_frozen(rank, state.is_frozen)

    def _tell_frozen(self, rank: int, is_frozen: bool) -> None:
        if is_frozen == (rank in self._frozen):
            return
        (self._frozen.add if is_frozen else self._frozen.discard)(rank)
        state = "is frozen: it is stopped, or hangs" if is_frozen else "runs again"
        log.warning("rank %d (node %d) %s", rank, self.number, state)


class RemoteRank:
    """A rank of another node, for those who watch the ranks one by one."""

    def __init__(self, rank: int, node: RemoteNode) -> None:
        self.name = f"rank {rank} (node {node.number})"
        self._node = node

    async def wait(self) -> int:
        return await self._node.wait()

    def kill(self) -> None:
        self._node.kill()

    @property
    def is_running(self) -> bool:
        return self._node.is_running


def node_name(number: int, ranks: range) -> str:
    """Returns `node 1 (rank 1)` or `node 1 (ranks 2 to 3)`."""
    if len(ranks) == 1:
        return f"node {number} (rank {ranks.start})"
    return f"node {number} (ranks {ranks.start} to {ranks.stop - 1})"


async def _send_beats(link: Link, beat: Callable[[], LeaderBeat]) -> None:
    while True:
        link.send(beat())
        await asyncio.sleep(BEAT_S)
