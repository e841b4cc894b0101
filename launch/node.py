"""`launch_server --node-rank R`, R > 0: the processes of this machine, without a router.

They start when node 0 has accepted this node. They end with the group of ranks: when one of them ends, or node 0 ends the
group, or the connection to it is lost. Then they are started again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from mla_router.launch.node_processes import Command, GroupStart, NodeProcesses
from mla_router.launch.output import Output
from mla_router.launch.process import Process, describe_exit
from mla_router.launch.signals import StopSignals
from mla_router.launch.supervisor import GaveUpError, RestartPolicy
from mla_router.worker.config import EXIT_BAD_SETTINGS, WorkerConfig
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.heartbeat_watch import RanksWatch
from mla_router.worker.nodes.address import host_port, own_address
from mla_router.worker.nodes.follower import NodeError, SettingsError, follow, join
from mla_router.worker.nodes.link import Link, LinkError
from mla_router.worker.nodes.messages import Ended, NodeBeat, RankState, Session
from mla_router.worker.nodes.remote_node import BEAT_S, node_name


async def serve_node(
    config: WorkerConfig, processes: NodeProcesses, output: Output, policy: RestartPolicy
) -> int:
    """Runs the processes of this node until a signal. Returns the exit status. Raises GaveUpError if they never served and
    a restart would not help."""
    node = Node(config, processes, output, policy)
    signals = StopSignals(kill=node.kill)
    own = node_name(config.node_rank, config.ranks_of(config.node_rank))
    output.launch(
        f"{own} of {config.nnodes} nodes; it has no router: requests go to node 0, which is expected at "
        f"{config.dist_init_addr}"
    )
    running = asyncio.create_task(node.keep_running())
    asked_to_stop = asyncio.create_task(signals.any())
    try:
        await asyncio.wait([running, asked_to_stop], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running  # raises the reason
        output.launch("stopping")
        return 0
    finally:
        asked_to_stop.cancel()
        running.cancel()
        await asyncio.wait([running])
        output.launch("stopped")


class Node:
    """The processes of this machine, across their restarts."""

    def __init__(
        self,
        config: WorkerConfig,
        processes: NodeProcesses,
        output: Output,
        policy: RestartPolicy,
    ) -> None:
        self._config = config
        self._processes = processes
        self._output = output
        self._policy = policy
        self._ranks = config.ranks_of(config.node_rank)
        self._commands: Sequence[Command] = ()
        self._running: list[Process] = []  # in the order of `_commands`
        self._has_served = False

    def kill(self) -> None:
        for process in self._running:
            process.kill()

    async def keep_running(self) -> None:
        """Raises GaveUpError."""
        failures = 0
        while True:
            served = _Served()
            try:
                reason = await self._run_once(served)
            except NodeError as error:
                if isinstance(error, SettingsError) or not self._has_served:
                    raise GaveUpError(str(error)) from error
                reason = str(error)
            self._has_served |= served.since is not None
            failures = 1 if served.seconds >= self._policy.proven_s else failures + 1
            if not self._has_served and failures >= self._policy.attempts:
                raise GaveUpError(f"{reason}, {failures} times before the ranks served")
            delay = self._policy.delay_s(failures)
            self._output.launch(f"{reason}; starting again in {delay:g} s")
            await asyncio.sleep(delay)

    async def _run_once(self, served: _Served) -> str:
        """Runs the processes until the group ends. Returns the reason. Raises NodeError."""
        config = self._config
        link, session = await join(config, self._output.launch, self._processes.urls)
        self._output.launch(f"node 0 at {config.dist_init_addr} has accepted this node")
        rank_0 = Heartbeat.create()
        own = [rank_0.of_rank(rank) for rank in self._ranks]
        elsewhere = set(range(config.tp_size)) - set(self._ranks)
        watched = elsewhere if config.attn_dp_size > 1 else ()
        others = {rank: rank_0.of_rank(rank) for rank in watched}
        tasks: list[asyncio.Task[str]] = []
        reason = "the launcher of this node stops"
        try:
            await self._start(session, rank_0)
            tasks = [
                asyncio.create_task(coroutine)
                for coroutine in (
                    self._deaths(),
                    follow(link, rank_0, config.watchdog_timeout, others),
                    self._beat(link, own),
                    served.watch(self._processes, rank_0, self._output),
                )
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # A process that ended is the cause of the others.
            first = next(task for task in tasks if task in done)
            try:
                reason = first.result()
            except LinkError as error:
                reason = f"the connection to node 0 is lost: {error}"
            return reason
        except NodeError as error:
            reason = str(error)
            raise
        finally:
            for task in tasks:
                task.cancel()
            self.kill()
            _say(link, reason)
            await link.close()
            await asyncio.gather(*(process.wait() for process in self._running))
            self._running = []

    async def _start(self, session: Session, rank_0: Heartbeat) -> None:
        """Raises NodeError."""
        try:
            address = own_address(*host_port(self._config.dist_init_addr))
            self._commands = self._processes.commands(GroupStart(session, rank_0, address))
            for one in self._commands:
                process = await Process.start(one.argv, one.show, one.environment, one.inherited)
                self._running.append(process)
        except OSError as error:  # too many processes, or a name server that does not answer
            raise NodeError(f"a process of this node did not start ({error.strerror})") from error

    async def _deaths(self) -> str:
        """Waits for the end of a process. Raises SettingsError if its settings were wrong."""
        deaths = [asyncio.create_task(process.wait()) for process in self._running]
        try:
            done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for death in deaths:
                death.cancel()
        name, status = next(
            (one.name, death.result())
            for one, death in zip(self._commands, deaths, strict=True)
            if death in done
        )
        text = f"{name} {describe_exit(status)}"
        if status == EXIT_BAD_SETTINGS:
            raise SettingsError(f"{text}; its own lines above say why")
        return text

    async def _beat(self, link: Link, own: Sequence[Heartbeat]) -> str:
        """Tells node 0 the state of the ranks. Raises LinkError."""
        watches = [RanksWatch([heartbeat]) for heartbeat in own]
        looking = [asyncio.create_task(watch.run()) for watch in watches]
        frozen: set[int] = set()
        try:
            while True:
                states = tuple(
                    RankState(heartbeat.age, watch.is_frozen)
                    for heartbeat, watch in zip(own, watches, strict=True)
                )
                link.send(NodeBeat(states))
                for rank, state in zip(self._ranks, states, strict=True):
                    if state.is_frozen and rank not in frozen:
                        self._output.launch(f"rank {rank} is frozen: it is stopped, or hangs")
                    (frozen.add if state.is_frozen else frozen.discard)(rank)
                await asyncio.sleep(BEAT_S)
        finally:
            for task in looking:
                task.cancel()


class _Served:
    """The time for which the group served in one start."""

    def __init__(self) -> None:
        self.since: float | None = None

    @property
    def seconds(self) -> float:
        return 0.0 if self.since is None else time.monotonic() - self.since

    async def watch(self, processes: NodeProcesses, rank_0: Heartbeat, output: Output) -> str:
        started = time.monotonic()
        await processes.until_serving(rank_0)
        self.since = time.monotonic()
        output.launch(
            f"ready after {self.since - started:.1f} s: the group serves with the ranks of this node"
        )
        return await asyncio.Future()


def _say(link: Link, reason: str) -> None:
    """Tells node 0 why the ranks end, if it still listens."""
    try:
        link.send(Ended(reason))
    except LinkError:
        return
