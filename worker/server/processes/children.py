"""The processes that the first API process of a worker starts: the scheduler, the other ranks, the extra API processes.

They share its process group and its output. The kernel kills them if it dies (`worker/child.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from socket import socket
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from mla_router.worker.config import WorkerConfig
from mla_router.worker.dp_group import DpGroup
from mla_router.worker.nodes.address import nccl_environment
from mla_router.worker.nodes.leader import Nodes
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient
from mla_router.worker.server.state import ServerState

SCHEDULER_STOP_S = 1.0  # grace period of the scheduler
# The same for a DP rank, whose scheduler ends together with those of the other DP ranks
DP_STOP_S = 30.0
# Grace period of the extra API processes, whose last answers take up to FLUSH_S (`serving.py`).
EXTRA_STOP_S = 1.5
EXTRA = (sys.executable, "-u", "-m", "mla_router.worker.server")


class Member(Protocol):
    """A process of the worker, or another node: the worker ends with it."""

    name: str

    async def wait(self) -> int: ...

    def kill(self) -> None: ...

    @property
    def is_running(self) -> bool: ...


class Child:
    """A running process. `name` is for the log."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self._process = process

    async def wait(self) -> int:
        """Waits for the end. Returns the exit status; it is negative for a signal."""
        return await self._process.wait()

    async def end(self, grace_s: float) -> None:
        """Waits for a process that was told to leave, and kills it after `grace_s`."""
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_s)
        if self.is_running:
            self._process.kill()
            await self._process.wait()

    def kill(self) -> None:
        if self.is_running:
            self._process.kill()

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None


@asynccontextmanager
async def scheduler_process(
    command: Sequence[str],
    state: ServerState,
    directory: Path,
    client: SchedulerClient,
    inputs: RankInputs,
) -> AsyncIterator[Child]:
    """Runs the scheduler within the block. `command` starts it; the flags are added here. `inputs`: see `rank_inputs`."""
    if (group := inputs.group) is not None:
        command = [*command, group.to_flag()]
        inputs = inputs._replace(inherited=(*inputs.inherited, *group.descriptors))
    child = Child("the scheduler", await _start_rank(command, state, directory, inputs))
    try:
        yield child
    finally:
        if child.is_running:
            client.shut_down()
        await child.end(SCHEDULER_STOP_S if inputs.group is None else DP_STOP_S)


class RankInputs(NamedTuple):
    """Inputs of the process of a rank in addition to the settings, for the rendezvous."""

    flags: tuple[str, ...] = ()
    inherited: tuple[int, ...] = ()  # descriptors
    environment: Mapping[str, str] = MappingProxyType({})
    group: DpGroup | None = None  # with DP attention


@contextmanager
def rank_inputs(
    config: WorkerConfig, nodes: Nodes | None, group: DpGroup | None = None
) -> Iterator[RankInputs]:
    """Makes what the ranks share: the store of the rendezvous, in inherited memory on one machine and on a socket of node 0
    on several, and the memory of token bitmasks. With DP attention, `group` has the store."""
    if config.tp_size == 1:
        yield RankInputs()
        return
    inherited = [os.memfd_create("mla-router-masks")]
    flags = [f"--masks-fd={inherited[0]}"]
    if group is not None:
        store, session, address = group.store, group.session, group.address
    elif nodes is not None:
        store, session, address = nodes.store_fd, nodes.session, nodes.address
    else:
        store, session, address = os.memfd_create("mla-router-ranks"), None, ""
        inherited.append(store)
    interface: Mapping[str, str] = {}
    if store is not None:
        flags.append(f"--store-fd={store}")
    if session is not None:
        flags += [f"--session={msgspec.json.encode(session).decode()}", f"--address={address}"]
        interface = nccl_environment(address, config.device)
    shared = inherited if store is None else {*inherited, store}
    try:
        yield RankInputs(tuple(flags), tuple(shared), interface, group)
    finally:
        for descriptor in inherited:
            os.close(descriptor)


@asynccontextmanager
async def rank_processes(
    command: Sequence[str], state: ServerState, directory: Path, inputs: RankInputs
) -> AsyncIterator[list[Child]]:
    """Runs the ranks other than 0 of this machine within the block, and kills them at its end, because they cannot work
    without rank 0. `command` starts one; the flags are added here."""
    children: list[Child] = []
    try:
        for rank in state.config.ranks_here[1:]:
            process = await _start_rank((*command, f"--rank={rank}"), state, directory, inputs)
            children.append(Child(f"rank {rank}", process))
        yield children
    finally:
        for child in children:
            child.kill()
        await asyncio.gather(*(child.wait() for child in children))


async def _start_rank(
    command: Sequence[str], state: ServerState, directory: Path, inputs: RankInputs
) -> Process:
    heartbeat = state.heartbeat.descriptor
    flags = [*state.config.to_argv(), f"--parent-pid={os.getpid()}", f"--heartbeat-fd={heartbeat}"]
    flags += ["--ipc-dir", str(directory), *inputs.flags]
    return await asyncio.create_subprocess_exec(
        *command,
        *flags,
        stdin=DEVNULL,
        pass_fds=(heartbeat, *inputs.inherited),
        # The user's choice of an interface has precedence.
        env={**inputs.environment, **state.config.child_environment()},
    )


@asynccontextmanager
async def rank_group(
    scheduler: Sequence[str],
    rank: Sequence[str],
    state: ServerState,
    directory: Path,
    client: SchedulerClient,
    nodes: Nodes | None,
    group: DpGroup | None = None,
) -> AsyncIterator[list[Member]]:
    """Runs the scheduler, which is rank 0, and the other ranks of this machine within the block. Yields all ranks in order,
    also the ranks of other nodes. `scheduler` and `rank`: commands without their flags."""
    with rank_inputs(state.config, nodes, group) as inputs:
        async with (
            rank_processes(rank, state, directory, inputs) as others,
            scheduler_process(scheduler, state, directory, client, inputs) as engine,
        ):
            try:
                yield [engine, *others, *(nodes.ranks if nodes is not None else ())]
            finally:
                if nodes is not None:
                    nodes.end()


@asynccontextmanager
async def extra_processes(
    state: ServerState, directory: Path, listeners: Sequence[socket]
) -> AsyncIterator[list[Child]]:
    """Runs the extra API processes within the block, one for each of `listeners`, whose ownership they take.

    The caller has to tell them to stop before it leaves the block.
    """
    children: list[Child] = []
    try:
        for number, listener in enumerate(listeners, 1):
            children.append(await _start_extra(state, directory, number, listener))
        yield children
    finally:
        await asyncio.gather(*(child.end(EXTRA_STOP_S) for child in children))


async def _start_extra(state: ServerState, directory: Path, number: int, listener: socket) -> Child:
    counters, heartbeat = state.counters.descriptor, state.heartbeat.descriptor
    own_heartbeat = state.own_heartbeat.descriptor
    with listener:
        process = await asyncio.create_subprocess_exec(
            *EXTRA,
            *state.config.to_argv(),
            f"--ipc-dir={directory}",
            f"--parent-pid={os.getpid()}",
            f"--number={number}",
            f"--start-info={msgspec.json.encode(state.start_info).decode()}",
            f"--listener-fd={listener.fileno()}",
            f"--counters-fd={counters}",
            f"--heartbeat-fd={heartbeat}",
            f"--own-heartbeat-fd={own_heartbeat}",
            stdin=DEVNULL,
            pass_fds=(listener.fileno(), counters, heartbeat, own_heartbeat),
            env=state.config.child_environment(),
        )
    return Child(f"server process {number}", process)
