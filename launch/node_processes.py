"""The processes of a node other than 0: the ranks of a worker, or with DP attention the DP ranks, which are workers."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from mla_router.launch.health import until_healthy
from mla_router.launch.local_worker import WorkerCommand
from mla_router.launch.output import Output
from mla_router.worker.config import WorkerConfig
from mla_router.worker.dp_group import DpGroup
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.nodes.address import nccl_environment
from mla_router.worker.nodes.messages import Session
from mla_router.worker.nodes.remote_node import BEAT_S

RankCommand = Callable[[WorkerConfig, int], Sequence[str]]


class GroupStart(NamedTuple):
    """One start of the group, as this node takes part in it."""

    session: Session
    heartbeat: Heartbeat  # that of rank 0, in the memory of all ranks
    address: str  # of this node, for the others


class Command(NamedTuple):
    """A process to start. Each line of its output goes to `show`."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    inherited: Sequence[int]  # descriptors
    show: Callable[[str], None]


class NodeProcesses(Protocol):
    """The processes of one node: ranks of a worker, or workers that are DP ranks."""

    urls: Sequence[str]  # the addresses of workers

    def commands(self, start: GroupStart) -> list[Command]: ...

    async def until_serving(self, rank_0: Heartbeat) -> None:
        """Waits until the group serves."""


def rank_command(config: WorkerConfig, rank: int) -> list[str]:
    # -u: unbuffered output.
    command = [sys.executable, "-u", "-m", "mla_router.worker.ranks", *config.to_argv()]
    return [*command, f"--rank={rank}", f"--parent-pid={os.getpid()}"]


class Ranks:
    """The ranks of one worker. Its server and its scheduler are on node 0."""

    urls: Sequence[str] = ()

    def __init__(self, config: WorkerConfig, command: RankCommand, output: Output) -> None:
        self._config = config
        self._command = command
        self._output = output

    def commands(self, start: GroupStart) -> list[Command]:
        session = msgspec.json.encode(start.session).decode()
        descriptor = start.heartbeat.descriptor
        interface = nccl_environment(start.address, self._config.device)
        flags = (
            f"--heartbeat-fd={descriptor}",
            f"--session={session}",
            f"--address={start.address}",
        )
        return [
            Command(
                f"rank {rank}",
                [*self._command(self._config, rank), *flags],
                # The user's choice of an interface has precedence.
                {**interface, **self._config.child_environment()},
                [descriptor],
                partial(self._output.rank, rank),
            )
            for rank in self._config.ranks_here
        ]

    async def until_serving(self, rank_0: Heartbeat) -> None:
        while not rank_0.pid:
            await asyncio.sleep(BEAT_S)


class DpRanks:
    """The DP ranks of this node. The router on node 0 sends requests to their servers."""

    def __init__(
        self, workers: Sequence[WorkerConfig], command: WorkerCommand, output: Output
    ) -> None:
        self._workers = workers
        self._command = command
        self._output = output
        self.urls: Sequence[str] = [worker.url for worker in workers]

    def commands(self, start: GroupStart) -> list[Command]:
        group = DpGroup(
            start.heartbeat.descriptor, None, session=start.session, address=start.address
        )
        return [
            Command(
                f"DP rank {worker.attn_dp_rank}",
                [*self._command(worker), group.to_flag()],
                worker.child_environment(),
                group.descriptors,
                partial(self._output.worker, worker.attn_dp_rank),
            )
            for worker in self._workers
        ]

    async def until_serving(self, rank_0: Heartbeat) -> None:  # noqa: ARG002 (of `NodeProcesses`)
        await asyncio.gather(*(until_healthy(one.host, one.port) for one in self._workers))
