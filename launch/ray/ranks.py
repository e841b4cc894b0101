"""The ranks of a worker on a node other than 0, as children of the node's actor."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

from mla_router.launch.node import Node
from mla_router.launch.node_processes import Ranks, rank_command
from mla_router.launch.output import Output
from mla_router.launch.supervisor import GaveUpError, RestartPolicy
from mla_router.worker.config import EXIT_BAD_SETTINGS, ConfigError, WorkerConfig
from mla_router.worker.model_folder import locate


async def run_ranks(config: WorkerConfig, show: Callable[[str], None]) -> int:
    """Runs the ranks until they cannot be started. Returns the exit status. Each line of output goes to `show`."""
    try:
        config = await asyncio.to_thread(locate, config)
        output = Output(_Lines(show))
        node = Node(config, Ranks(config, rank_command, output), output, RestartPolicy())
        await node.keep_running()
    except ConfigError as error:
        show(f"error: {error}")
        return EXIT_BAD_SETTINGS
    except GaveUpError as error:
        show(f"error: {error}")
    return 1


class _Lines(io.StringIO):
    """A stream whose lines go to `show`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def flush(self) -> None:
        for line in self.getvalue().splitlines():
            self._show(line)
        self.seek(0)
        self.truncate()
