"""The processes that the first API process of a worker starts: the scheduler, the other ranks, the extra API processes.

They share its process group and its output. The kernel kills them if it dies (`worker/child.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from socket import socket
from typing import NamedTuple

import msgspec

from mla_router.worker.server.ipc.scheduler_client import SchedulerClient
from mla_router.worker.server.state import ServerState

SCHEDULER_STOP_S = 1.0  # grace period of the scheduler
# Grace period of the extra API processes, whose last answers take up to FLUSH_S (`serving.py`).
EXTRA_STOP_S = 1.5
EXTRA = (sys.executable, "-u", "-m", "mla_router.worker.server")


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
    memory: RanksMemory | None,
) -> AsyncIterator[Child]:
    """Runs the scheduler within the block. `command` starts it; the flags are added here."""
    child = Child("the scheduler", await _start_rank(command, state, directory, memory))
    try:
        yield child
    finally:
        if child.is_running:
            client.shut_down()
        await child.end(SCHEDULER_STOP_S)


class RanksMemory(NamedTuple):
    """Descriptors of anonymous memory that several ranks inherit."""

    store: int  # torch's FileStore, for the rendezvous
    masks: int  # `MaskMemory`


@contextmanager
def ranks_memory(size: int) -> Iterator[RanksMemory | None]:
    """Makes the memory of `size` ranks, and yields it; None for one rank."""
    if size == 1:
        yield None
        return
    memory = RanksMemory(*(os.memfd_create(f"mla-router-{name}") for name in RanksMemory._fields))
    try:
        yield memory
    finally:
        for descriptor in memory:
            os.close(descriptor)


@asynccontextmanager
async def rank_processes(
    command: Sequence[str], state: ServerState, directory: Path, memory: RanksMemory | None
) -> AsyncIterator[list[Child]]:
    """Runs the ranks other than 0 within the block, and kills them at its end, because they cannot work without rank 0. `command` starts one; the flags are added here."""
    children: list[Child] = []
    try:
        for rank in range(1, state.config.tp_size):
            process = await _start_rank((*command, f"--rank={rank}"), state, directory, memory)
            children.append(Child(f"rank {rank}", process))
        yield children
    finally:
        for child in children:
            child.kill()
        await asyncio.gather(*(child.wait() for child in children))


async def _start_rank(
    command: Sequence[str], state: ServerState, directory: Path, memory: RanksMemory | None
) -> Process:
    heartbeat = state.heartbeat.descriptor
    flags = [*state.config.to_argv(), f"--parent-pid={os.getpid()}", f"--heartbeat-fd={heartbeat}"]
    flags += ["--ipc-dir", str(directory)]
    inherited: tuple[int, ...] = (heartbeat,)
    if memory is not None:
        flags += [f"--store-fd={memory.store}", f"--masks-fd={memory.masks}"]
        inherited = (heartbeat, *memory)
    return await asyncio.create_subprocess_exec(
        *command,
        *flags,
        stdin=DEVNULL,
        pass_fds=inherited,
        env=state.config.child_environment(),
    )


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
            stdin=DEVNULL,
            pass_fds=(listener.fileno(), counters, heartbeat),
            env=state.config.child_environment(),
        )
    return Child(f"server process {number}", process)
