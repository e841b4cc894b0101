"""The actor on a node of the cluster: one worker as its child process. No tokens and no weights pass through Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from ray.util import get_node_ip_address

from mla_router import __version__
from mla_router.launch.local_worker import worker_command
from mla_router.launch.ports import ClaimedPorts
from mla_router.launch.process import Process
from mla_router.worker.config import WorkerConfig, with_port

MAX_LINES = 1000  # in one event


class WorkerActor:
    """Runs one worker once, or its ranks on a node other than 0. Ray ends the actor with the launcher, which owns it, and
    the kernel ends the processes with the actor."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def run(self, version: str, settings: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Starts a worker at this node's address in the cluster, or the ranks of this node. Yields the events, each a dict
        with one item:

        * `address`: [host, port, meeting], first, of a worker; its nodes meet at the port `meeting`;
        * `lines`: lines of its output;
        * `status`: exit status, last.

        `version`: of the launcher's package. `settings`: the fields of a `WorkerConfig`. The worker listens on the first
        free port from `port` on. Raises ValueError, NoPortError.
        """
        if version != __version__:
            raise ValueError(
                f"this node has mla-router {__version__}, the launcher {version}; install one version on all nodes"
            )
        config = WorkerConfig(**settings)
        lines: asyncio.Queue[str | None] = asyncio.Queue()
        if config.node_rank:
            from mla_router.launch.ray.ranks import run_ranks

            async for event in _events(run_ranks(config, lines.put_nowait), lines):
                yield event
            return
        host = get_node_ip_address()
        with ClaimedPorts(host, config.port, 2, frozenset()) as (port, meeting):
            config = replace(config, host=host, port=port)
            if config.nnodes > 1:
                config = replace(config, dist_init_addr=with_port(host, meeting))
            yield {"address": [host, port, meeting]}
            self._process = await Process.start(
                worker_command(config), lines.put_nowait, config.child_environment()
            )
            async for event in _events(self._process.wait(), lines):
                yield event

    async def stop(self, grace_s: float) -> None:
        """Stops the worker. SIGKILL follows after `grace_s`."""
        if self._process is not None:
            await self._process.stop(grace_s)


async def _events(
    running: Coroutine[Any, Any, int], lines: asyncio.Queue[str | None]
) -> AsyncIterator[dict[str, Any]]:
    """Yields the lines of what runs as they come, and last its exit status."""
    ended = asyncio.create_task(running)
    ended.add_done_callback(lambda _: lines.put_nowait(None))
    at_end = False
    while not at_end:
        batch = [await lines.get()]
        while not lines.empty() and len(batch) < MAX_LINES:
            batch.append(lines.get_nowait())
        at_end = batch[-1] is None
        yield {"lines": [line for line in batch if line is not None]}
    yield {"status": ended.result()}
