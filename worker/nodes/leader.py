"""The other nodes as node 0 sees them. It listens for them, tells them where the ranks meet, and learns of their state.

The end of a connection is the end of the node: its ranks cannot be used, so the worker ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.nodes.address import host_port, resolve
from mla_router.worker.nodes.equal import difference, facts
from mla_router.worker.nodes.link import HANDSHAKE_S, Link, LinkError
from mla_router.worker.nodes.messages import (
    Ended,
    Hello,
    LeaderBeat,
    Meeting,
    NodeBeat,
    Refused,
    Welcome,
)

BEAT_S = 0.25
MAX_STRANGERS = 16  # connections whose node is not yet known
WARN_EVERY_S = 10.0  # strangers must not fill the log
EXIT_NODE_ENDED = 3
EXIT_BAD_SETTINGS = 2  # the launcher does not try again, unless the worker was ready before

log = logging.getLogger(__name__)


class Node:
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

    async def serve(self, link: Link, rank_0: Heartbeat, timeout_s: float) -> None:
        """Exchanges beats until one side ends. `timeout_s`: longest silence."""
        receiving = asyncio.create_task(self._receive(link, timeout_s))
        sending = asyncio.create_task(_send_beats(link, rank_0))
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

    def __init__(self, rank: int, node: Node) -> None:
        self.name = f"rank {rank} (node {node.number})"
        self._node = node

    async def wait(self) -> int:
        return await self._node.wait()

    def kill(self) -> None:
        self._node.kill()

    @property
    def is_running(self) -> bool:
        return self._node.is_running


class Nodes:
    """All other nodes, and the sockets of node 0 for them."""

    def __init__(self, config: WorkerConfig, heartbeat: Heartbeat, store: socket.socket) -> None:
        """`heartbeat`: that of rank 0. `store`: the listening socket of the store."""
        self._config = config
        self._rank_0 = heartbeat
        self._facts = facts(config)
        self._store = store
        self._reason = "node 0 has ended or restarts its ranks; its own log lines say why"
        self._strangers = 0
        self._warned = -WARN_EVERY_S
        host, port = store.getsockname()[:2]
        self.address = str(host)
        self.meeting = Meeting(secrets.token_hex(16), self.address, port)
        self.others = [
            Node(number, ranks, [heartbeat.of_rank(rank) for rank in ranks])
            for number in range(1, config.nnodes)
            for ranks in (config.ranks_of(number),)
        ]

    @property
    def store_fd(self) -> int:
        return self._store.fileno()

    @property
    def ranks(self) -> list[RemoteRank]:
        return [RemoteRank(rank, node) for node in self.others for rank in node.ranks]

    async def expect(self) -> None:
        """Ends the missing nodes after --dist-timeout, and with them the worker."""
        timeout_s = self._config.dist_timeout
        await asyncio.sleep(timeout_s)
        missing = [node for node in self.others if not node.has_come]
        if not missing:
            return
        self._reason = (
            f"after {timeout_s:g} s (--dist-timeout) {' and '.join(node.name for node in missing)} of "
            f"{self._config.nnodes} nodes {'has' if len(missing) == 1 else 'have'} not come to "
            f"{self._config.dist_init_addr}"
        )
        log.error("%s; is the command running there, with its --node-rank?", self._reason)
        for node in missing:
            node.end(EXIT_BAD_SETTINGS)

    async def accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serves a connection until its end."""
        peer = writer.get_extra_info("peername")
        if self._strangers >= MAX_STRANGERS:
            writer.transport.abort()
            return
        link = None
        self._strangers += 1
        try:
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    link = await Link.accept(reader, writer, self._config.dist_key)
                    hello = await link.receive(HANDSHAKE_S)
                    if not isinstance(hello, Hello):
                        raise LinkError("a message that does not belong here")
            finally:
                self._strangers -= 1
            if (refused := self._refuse(hello)) is not None:
                link.send(refused)
                return
            node = self.others[hello.node - 1]
            node.has_come = True
            link.send(Welcome(self.meeting))
            log.info("%s has come, from %s", node.name, peer[0] if peer else "?")
            await node.serve(link, self._rank_0, self._config.watchdog_timeout)
            with suppress(LinkError):
                link.send(Ended(self._reason))
        except (LinkError, TimeoutError, OSError) as error:
            self._warn(f"a connection from {peer[0] if peer else '?'} was refused: {error}")
        finally:
            if link is None:
                writer.transport.abort()
            else:
                await link.close()

    def end(self) -> None:
        for node in self.others:
            node.end(EXIT_NODE_ENDED)

    def _refuse(self, hello: Hello) -> Refused | None:
        if not 0 < hello.node <= len(self.others):
            return Refused(
                f"--node-rank {hello.node}: node 0 has --nnodes {self._config.nnodes}", True
            )
        node = self.others[hello.node - 1]
        if node.has_come or not node.is_running:
            return Refused(f"another {node.name} is connected, or the group restarts", False)
        if found := difference(self._facts, hello.facts, hello.node):
            log.error("%s cannot take part: %s", node.name, found)
            self._reason = found
            node.end(EXIT_BAD_SETTINGS)
            return Refused(found, True)
        return None

    def _warn(self, text: str) -> None:
        if (now := time.monotonic()) - self._warned >= WARN_EVERY_S:
            self._warned = now
            log.warning("%s", text)


@asynccontextmanager
async def other_nodes(config: WorkerConfig, heartbeat: Heartbeat) -> AsyncIterator[Nodes | None]:
    """Listens for the other nodes within the block; yields None on one machine. At the end all nodes end their ranks.

    Raises ConfigError if --dist-init-addr is no address of this machine, or its port is taken.
    """
    if config.nnodes == 1:
        yield None
        return
    listener, store = _listen(config)
    with listener, store:
        nodes = Nodes(config, heartbeat, store)
        connections: set[asyncio.Task[None]] = set()

        def accept(reader: StreamReader, writer: StreamWriter) -> None:
            task = asyncio.create_task(nodes.accept(reader, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        server = await asyncio.start_server(accept, sock=listener)
        expecting = asyncio.create_task(nodes.expect())
        try:
            yield nodes
        finally:
            server.close()
            expecting.cancel()
            nodes.end()
            if connections:  # the last messages
                _, late = await asyncio.wait(connections, timeout=2.0)
                for task in late:
                    task.cancel()


def node_name(number: int, ranks: range) -> str:
    """Returns `node 1 (rank 1)` or `node 1 (ranks 2 to 3)`."""
    if len(ranks) == 1:
        return f"node {number} (rank {ranks.start})"
    return f"node {number} (ranks {ranks.start} to {ranks.stop - 1})"


def _listen(config: WorkerConfig) -> tuple[socket.socket, socket.socket]:
    """Returns the sockets for nodes and for the store, on the one address of --dist-init-addr. Raises ConfigError."""
    host, port = host_port(config.dist_init_addr)
    try:
        family, address = resolve(host, port)
        if address in ("0.0.0.0", "::"):
            raise ConfigError(
                f"--dist-init-addr {config.dist_init_addr}: give the address of one interface of node 0"
            )
        listener = socket.create_server((address, port), family=family)
        return listener, socket.create_server((address, 0), family=family)
    except OSError as error:
        raise ConfigError(
            f"--dist-init-addr {config.dist_init_addr}: node 0 cannot listen there: {os.strerror(error.errno or 0)}; HOST "
            f"is an address of node 0, and PORT is free"
        ) from error


async def _send_beats(link: Link, rank_0: Heartbeat) -> None:
    while True:
        link.send(LeaderBeat(serves=rank_0.pid != 0, expected_s=rank_0.expected_s))
        await asyncio.sleep(BEAT_S)
