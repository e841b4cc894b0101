"""The actor on a node of the cluster: one worker as its child process. No tokens and no weights pass through Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from ray.util import get_node_ip_address

from mla_router import __version__
from mla_router.launch.local_worker import worker_command
from mla_router.launch.ports import ClaimedPorts
from mla_router.launch.process import Process
from mla_router.worker.config import WorkerConfig

MAX_LINES = 1000  # in one event


class WorkerActor:
    """Runs one worker once. Ray ends the actor with the launcher, which owns it, and the kernel ends the worker with the
    actor."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def run(self, version: str, settings: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Starts a worker at this node's address in the cluster. Yields its events, each a dict with one item:

        * `address`: [host, port], first;
        * `lines`: lines of its output;
        * `status`: exit status, last.

        `version` is that of the launcher. `settings` are the fields of a `WorkerConfig`; the worker gets the first free
        port from its `port` on. Raises ValueError, NoPortError.
        """
        if version != __version__:
            raise ValueError(
                f"this node has mla-router {__version__}, the launcher {version}; install one version on all nodes"
            )
        host = get_node_ip_address()
        config = WorkerConfig(**settings)
        with ClaimedPorts(host, config.port, 1, frozenset()) as (port,):
            config = replace(config, host=host, port=port)
            yield {"address": [host, port]}
            lines: asyncio.Queue[str | None] = asyncio.Queue()
            self._process = await Process.start(
                worker_command(config), lines.put_nowait, config.child_environment()
            )
            ended = asyncio.create_task(self._process.wait())
            ended.add_done_callback(lambda _: lines.put_nowait(None))
            async for batch in _batches(lines):
                yield {"lines": batch}
            yield {"status": ended.result()}

    async def stop(self, grace_s: float) -> None:
        """Stops the worker. SIGKILL follows after `grace_s`."""
        if self._process is not None:
            await self._process.stop(grace_s)


async def _batches(lines: asyncio.Queue[str | None]) -> AsyncIterator[list[str]]:
    """Yields the lines as they come, up to None."""
    at_end = False
    while not at_end:
        batch = [await lines.get()]
        while not lines.empty() and len(batch) < MAX_LINES:
            batch.append(lines.get_nowait())
        at_end = batch[-1] is None
        yield [line for line in batch if line is not None]
