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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from mla_router.worker.config import EXIT_BAD_SETTINGS, ConfigError, WorkerConfig
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.heartbeat_watch import RanksWatch
from mla_router.worker.nodes.address import host_port, resolve_in_time
from mla_router.worker.nodes.equal import difference, facts
from mla_router.worker.nodes.link import HANDSHAKE_S, Link, LinkError
from mla_router.worker.nodes.messages import (
    Ended,
    Hello,
    LeaderBeat,
    RankState,
    Refused,
    Session,
    Welcome,
)
from mla_router.worker.nodes.remote_node import EXIT_NODE_ENDED, RemoteNode, RemoteRank

MAX_STRANGERS = 16  # connections whose node is not yet known
WARN_EVERY_S = 10.0  # strangers must not fill the log

log = logging.getLogger(__name__)


class Nodes:
    """All other nodes, and the sockets of node 0 for them."""

    def __init__(
        self,
        config: WorkerConfig,
        heartbeat: Heartbeat,
        store: socket.socket,
        on_urls: Callable[[int, Sequence[str]], None],
    ) -> None:
        """`heartbeat`: that of rank 0. `store`: the listening socket of the store. `on_urls`: see `other_nodes`."""
        self._config = config
        self._rank_0 = heartbeat
        self._on_urls = on_urls
        pages = map(heartbeat.of_rank, range(config.tp_size if config.attn_dp_size > 1 else 0))
        self._watched = [(page, RanksWatch([page])) for page in pages]
        self._facts = facts(config)
        self._store = store
        self._reason = "node 0 has ended or restarts its ranks; its own log lines say why"
        self._strangers = 0
        self._warned = -WARN_EVERY_S
        host, port = store.getsockname()[:2]
        self.address = str(host)
        self.session = Session(secrets.token_hex(16), self.address, port)
        self.others = [
            RemoteNode(number, ranks, [heartbeat.of_rank(rank) for rank in ranks])
            for number in range(1, config.nnodes)
            for ranks in (config.ranks_of(number),)
        ]

    @property
    def store_fd(self) -> int:
        return self._store.fileno()

    @property
    def ranks(self) -> list[RemoteRank]:
        return [RemoteRank(rank, node) for node in self.others for rank in node.ranks]

    async def watch(self) -> None:
        """Watches the ranks of this node for the others, which do not see their processes. With DP attention only."""
        await asyncio.gather(*(watch.run() for _, watch in self._watched))

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
            self._on_urls(node.number, hello.urls)
            link.send(Welcome(self.session))
            log.info("%s has come, from %s", node.name, peer[0] if peer else "?")
            await node.serve(link, self._beat, self._config.watchdog_timeout)
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

    def _beat(self) -> LeaderBeat:
        rank_0 = self._rank_0
        states = tuple(RankState(page.age, watch.is_frozen) for page, watch in self._watched)
        return LeaderBeat(rank_0.pid != 0, rank_0.expected_s, states)

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
async def other_nodes(
    config: WorkerConfig,
    heartbeat: Heartbeat,
    on_urls: Callable[[int, Sequence[str]], None] = lambda _node, _urls: None,
) -> AsyncIterator[Nodes | None]:
    """Listens for the other nodes within the block; yields None on one machine. At the end all nodes end their ranks.

    `heartbeat`: that of rank 0. `on_urls` gets the number of a node that comes, and the addresses of its workers. Raises
    ConfigError if --dist-init-addr is no address of this machine, or its port is taken."""
    if config.nnodes == 1:
        yield None
        return
    listener, store = await _listen(config)
    with listener, store:
        nodes = Nodes(config, heartbeat, store, on_urls)
        connections: set[asyncio.Task[None]] = set()

        def accept(reader: StreamReader, writer: StreamWriter) -> None:
            task = asyncio.create_task(nodes.accept(reader, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        server = await asyncio.start_server(accept, sock=listener)
        tasks = [asyncio.create_task(nodes.expect()), asyncio.create_task(nodes.watch())]
        try:
            yield nodes
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            nodes.end()
            if connections:  # the last messages
                _, late = await asyncio.wait(connections, timeout=2.0)
                for task in late:
                    task.cancel()


async def _listen(config: WorkerConfig) -> tuple[socket.socket, socket.socket]:
    """Returns the sockets for nodes and for the store, on the one address of --dist-init-addr. Raises ConfigError."""
    host, port = host_port(config.dist_init_addr)
    try:
        family, address = await resolve_in_time(host, port, config.dist_timeout, log.warning)
    except OSError as error:
        raise ConfigError(
            f"--dist-init-addr {config.dist_init_addr}: {error.strerror or error}"
        ) from error
    try:
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
