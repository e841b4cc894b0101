"""The DP ranks of a group as child processes of the launcher: workers that start and end together. With --nnodes the DP
ranks of the other nodes belong to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from mla_router.launch.local_worker import LocalWorker
from mla_router.launch.supervisor import End
from mla_router.worker.config import EXIT_BAD_SETTINGS, ConfigError, WorkerConfig

if TYPE_CHECKING:
    from mla_router.worker.dp_group import DpGroup
    from mla_router.worker.nodes.remote_node import RemoteNode

Show = Callable[[str], None]
# Gets the number of a node that has come, and the addresses of its workers
OnUrls = Callable[[int, Sequence[str]], None]


class LocalGroup:
    """A `Worker` of this machine, with a process for each DP rank. Each line of their output goes to its `Show`."""

    def __init__(
        self,
        members: Sequence[tuple[WorkerConfig, Sequence[str], Show]],
        on_urls: OnUrls = lambda _node, _urls: None,
    ) -> None:
        """`members`: settings, command and output of each DP rank on this machine."""
        self._members = members
        self._on_urls = on_urls
        self._running: list[LocalWorker] = []

    async def run(self, on_ready: Callable[[str], None]) -> End:
        """Runs the DP ranks until one ends, or another node, and kills the others."""
        try:
            # What they share lasts as long as this run: a group that starts again gets new ones
            async with self._shared() as (groups, nodes):
                return await self._run(groups, nodes, on_ready)
        except ConfigError as error:  # --dist-init-addr
            return End(EXIT_BAD_SETTINGS, f"cannot start: {error}")

    async def _run(
        self,
        groups: Sequence[DpGroup],
        nodes: Sequence[RemoteNode],
        on_ready: Callable[[str], None],
    ) -> End:
        ready: list[str] = []

        def one_is_ready(process: str) -> None:
            ready.append(process)
            if len(ready) == len(self._members):
                on_ready(", ".join(ready))

        self._running = [
            LocalWorker(config, [*command, group.to_flag()], show, group.descriptors)
            for (config, command, show), group in zip(self._members, groups, strict=True)
        ]
        ends = [asyncio.create_task(one.run(one_is_ready)) for one in self._running]
        lost = [asyncio.create_task(node.wait()) for node in nodes]
        try:
            await asyncio.wait([*ends, *lost], return_when=asyncio.FIRST_COMPLETED)
            end = _first_end(ends, nodes, lost)
        finally:
            for task in (*ends, *lost):
                task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)  # none is still starting
        await self.stop(0.0)
        return end

    @asynccontextmanager
    async def _shared(self) -> AsyncIterator[tuple[Sequence[DpGroup], Sequence[RemoteNode]]]:
        """Makes what the DP ranks share. Yields it for each of this machine, and the other nodes. Raises ConfigError."""
        # Not at the top: without its packages `launch_server` still says which are missing
        from mla_router.worker.dp_group import DpGroup, dp_groups
        from mla_router.worker.heartbeat import Heartbeat
        from mla_router.worker.nodes.leader import other_nodes

        heartbeat = Heartbeat.create()
        async with other_nodes(self._members[0][0], heartbeat, self._on_urls) as nodes:
            if nodes is None:
                with dp_groups(len(self._members)) as groups:
                    yield groups, ()
            else:
                shared = DpGroup(
                    heartbeat.descriptor,
                    nodes.store_fd,
                    session=nodes.session,
                    address=nodes.address,
                )
                yield [shared] * len(self._members), nodes.others

    async def stop(self, grace_s: float) -> None:
        await asyncio.gather(*(one.stop(grace_s) for one in self._running))

    def kill(self) -> None:
        for one in self._running:
            one.kill()


def _first_end(
    ends: Sequence[asyncio.Task[End]],
    nodes: Sequence[RemoteNode],
    lost: Sequence[asyncio.Task[int]],
) -> End:
    """Returns the end of the group, caused by a node or a DP rank. The loss of a node comes first: it ends DP ranks."""
    for node, loss in zip(nodes, lost, strict=True):
        if loss.done():
            return End(loss.result(), f"is a group whose {node.name} has ended")
    # The DP ranks of this node are the first of all: the launcher of node 0 has the group
    rank, end = next((rank, task.result()) for rank, task in enumerate(ends) if task.done())
    return End(end.status, f"is a group whose DP rank {rank} {end}")
