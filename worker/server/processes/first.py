"""The first API process of a worker: it starts the scheduler, the other ranks and the extra API processes, serves, and
ends them.

The socket listens before the weights are loaded, so that a wrong port fails at once. Until the scheduler and all API
processes are ready, /health returns "starting".
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mla_router.worker.config import EXIT_BAD_SETTINGS, WorkerConfig
from mla_router.worker.dp_group import DpGroup
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.heartbeat_watch import STUCK_FACTOR, until_stuck
from mla_router.worker.messages import Barrier, Drain, PeerQuery, Ready, Stop
from mla_router.worker.nodes.leader import other_nodes
from mla_router.worker.server.errors import ENGINE_DIED, ApiError, Unavailable
from mla_router.worker.server.ipc.peers import Peers, join
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient, connect
from mla_router.worker.server.ipc.shared_counters import SharedCounters
from mla_router.worker.server.processes.children import (
    Member,
    extra_processes,
    rank_group,
)
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

EXIT_CHILD_DIED = 3

# Longest folder for the ipc directory: the path of a socket has at most 107 bytes (unix(7))
MAX_PARENT = 107 - len("/mla-router-12345678/to_scheduler_")
DRAIN_GRACE_S = 30.0  # longest time of running requests after SIGTERM


async def run(
    config: WorkerConfig,
    listeners: Sequence[socket.socket],
    scheduler: Sequence[str],
    rank: Sequence[str],
    group: DpGroup | None = None,
) -> int:
    """Serves until a signal or the death of a process. Returns the exit status.

    `config` and `listeners` come from `listeners.listen`. `scheduler` and `rank` are the commands of a scheduler and of
    another rank, without their flags. `group`: the DP ranks, of which this worker is one.
    """
    servers = config.tokenizer_worker_num
    first = config.ranks.start
    heartbeat = Heartbeat.create() if group is None else Heartbeat(group.heartbeats, first)
    state = ServerState(
        config,
        counters=SharedCounters.create(servers),
        heartbeat=heartbeat,
        own_heartbeat=Heartbeat.create(servers),
    )
    signals = Signals()
    with ipc_directory() as directory:
        # The blocks end in reverse order: the last answers go out before the scheduler ends.
        async with (
            # With DP attention the launchers of the nodes know each other
            other_nodes(config, state.heartbeat) if group is None else nullcontext() as nodes,
            connect(directory, 0, state.shared) as client,
            join(directory, 0, servers) as peers,
            rank_group(scheduler, rank, state, directory, client, nodes, group) as ranks,
            extra_processes(state, directory, listeners[1:]) as extras,
            serving(state, listeners[0]),
        ):
            worker = _Worker(state, client, peers, ranks, extras)
            peers.start(worker.answer)
            return await worker.serve(directory, signals)


class _Worker:
    """All processes of a worker, as the first API process controls them."""

    def __init__(
        self,
        state: ServerState,
        client: SchedulerClient,
        peers: Peers,
        ranks: Sequence[Member],
        extras: Sequence[Member],
    ) -> None:
        """`ranks`: the scheduler, which is rank 0, and the other ranks, in order."""
        self._state = state
        self._client = client
        self._peers = peers
        self._ranks = ranks
        self._children = [*ranks, *extras]
        self._names = NamedRequests(client, peers)
        self._barrier = asyncio.Barrier(state.config.tokenizer_worker_num)

    async def answer(self, question: PeerQuery) -> int:
        """Answers a question of an extra API process."""
        if isinstance(question, Barrier):
            await self._barrier.wait()
            return 0
        return await self._names.answer(question)

    async def serve(self, directory: Path, signals: Signals) -> int:
        """Serves once all API processes can answer, and waits for the end. Returns the exit status.

        At the end all open requests get an error.
        """
        starting = asyncio.create_task(self._start(directory))
        watching = asyncio.create_task(self._watch(starting))
        deaths = [asyncio.create_task(child.wait()) for child in self._children]
        stop = asyncio.create_task(signals.stop.wait())
        drain = asyncio.create_task(signals.drain.wait())
        try:
            await _first(starting, *deaths, drain, stop)
            if starting.done() and (failure := starting.exception()) is not None:
                if not isinstance(failure, TokenizerError | ApiError):
                    raise failure
                log.error("%s", failure)
                return EXIT_BAD_SETTINGS if isinstance(failure, TokenizerError) else EXIT_FAILED
            await _first(*deaths, drain, stop)
            if drain.done() and not any(task.done() for task in (*deaths, stop)):
                idle = asyncio.create_task(self._drain())
                await _first(idle, *deaths, stop, timeout=DRAIN_GRACE_S)
                idle.cancel()
            return self._status(deaths)
        finally:
            # 503 and not 500, so that a router sends the requests without a first byte to another worker.
            died = any(death.done() for death in deaths)
            self._fail(
                "A process of this worker has ended" if died else "This worker is shutting down"
            )
            # Reads the error of a question to the scheduler, which has just failed: asyncio would log it otherwise
            starting.add_done_callback(lambda task: task.cancelled() or task.exception())
            for task in (starting, watching, *deaths, stop, drain):
                task.cancel()
            if not all(rank.is_running for rank in self._ranks):
                # A rank that waits for a dead rank would not stop by itself
                for rank in self._ranks:
                    rank.kill()

    async def _start(self, directory: Path) -> None:
        """Raises TokenizerError, ApiError."""
        state = self._state
        service = await prepare(state, self._client, self._names)
        await self._barrier.wait()  # all processes can answer
        # The sockets are connected, and their names are no longer needed. Removed now, they cannot remain after a
        # SIGKILL.
        shutil.rmtree(directory, ignore_errors=True)
        state.service = service
        await self._barrier.wait()  # all processes serve
        seconds = time.monotonic() - state.start_info.started
        log.info(_startup_line(state.config, service.limits, seconds))
        state.shared.complete.set(1)

    async def _watch(self, started: asyncio.Task[None]) -> None:
        """Kills a process that hangs for long. The worker then ends, and the launcher starts a new one."""
        await asyncio.wait((started,))
        state = self._state
        servers = range(1, state.config.tokenizer_worker_num)
        heartbeats = [*state.ranks[1:], *map(state.own_heartbeat.of_rank, servers)]
        watchdog_s = state.config.watchdog_timeout

        def ages() -> list[float]:
            return [self._client.latest_stats.age, *(heartbeat.age for heartbeat in heartbeats)]

        stuck = self._children[await until_stuck(ages, watchdog_s)]
        log.error(
            "%s has been stuck for %g seconds, and is ended", stuck.name, STUCK_FACTOR * watchdog_s
        )
        stuck.kill()

    async def _drain(self) -> None:
        """Returns when no request runs."""
        if self._state.service is None:
            return
        self._state.draining = True
        log.info("draining: %d requests are running", self._client.open_requests)
        await asyncio.gather(self._client.until_idle(), self._peers.ask_all(Drain(), timeout=None))

    def _status(self, deaths: Sequence[asyncio.Task[int]]) -> int:
        for child, death in zip(self._children, deaths, strict=True):
            if not death.done():
                continue
            if self._state.service is None and death.result() == EXIT_BAD_SETTINGS:
                return EXIT_BAD_SETTINGS  # the scheduler has printed the reason
            log.error("%s has ended with status %d", child.name, death.result())
            return EXIT_CHILD_DIED
        return EXIT_STOPPED

    def _fail(self, reason: str) -> None:
        """Ends all requests of all API processes with a 503."""
        self._state.draining = True
        self._client.fail(Unavailable(reason, code=ENGINE_DIED))
        self._peers.tell_all(Stop(reason))


def _startup_line(config: WorkerConfig, limits: Ready, seconds: float) -> str:
    device = limits.device
    if (ranks := len(config.ranks)) > 1:
        last = config.base_gpu_id + len(config.ranks_here) - 1
        device = f"{ranks} ranks on {device}" + (f" to cuda:{last}" if device != "cpu" else "")
    if config.attn_dp_size > 1:
        device = f"DP rank {config.attn_dp_rank} of {config.attn_dp_size}, {device}"
    if config.nnodes > 1:
        device += f" on {'one' if config.attn_dp_size > 1 else 'each'} of {config.nnodes} nodes"
    overlap = "off" if config.disable_overlap_schedule else "on"
    servers = config.tokenizer_worker_num
    return (
        f"worker {config.name} ready: {config.url}, model {config.model_name}, "
        f"{device} {limits.dtype}, {limits.max_total_num_tokens} KV tokens of {limits.kv_cache_dtype} "
        f"in pages of {limits.page_size}, overlap {overlap}, "
        f"{servers} server {'process' if servers == 1 else 'processes'}, {seconds:.1f} s"
    )


class Signals:
    """SIGTERM drains: running requests finish first. SIGINT, or a second SIGTERM, stops at once.

    SIGHUP drains as well. It never stops at once, because a closed terminal may send it several times. With nohup it is
    ignored and stays so."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(signal.SIGINT, self.stop.set)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.drain.set)
        self._terminated = False

    def _on_term(self) -> None:
        (self.stop if self._terminated else self.drain).set()
        self._terminated = True


@contextmanager
def ipc_directory() -> Iterator[Path]:
    """Makes a directory with mode 0700. Access to its sockets gives control of the scheduler. It is in /tmp if TMPDIR is
    too long for the paths of sockets."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > MAX_PARENT:
        parent = "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="mla-router-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _first(*tasks: asyncio.Task[Any], timeout: float | None = None) -> None:
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
