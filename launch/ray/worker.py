"""A worker on a node of the cluster, in the router's rotation while it is healthy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Protocol

from mla_router import RouterError
from mla_router.launch.health import until_healthy, until_silent
from mla_router.launch.ray.cluster import LostError, StartError
from mla_router.launch.supervisor import End
from mla_router.worker.config import WorkerConfig, with_port

PENDING_S = 5.0  # until the output tells that a worker waits for room


class WorkerList(Protocol):
    """The part of a `Router` that a worker needs."""

    def add_worker(self, url: str) -> None: ...
    def remove_worker(self, url: str) -> None: ...


class Placement(Protocol):
    """The part of a `Placed` that a worker needs."""

    def run(self, config: WorkerConfig) -> AsyncIterator[dict[str, Any]]: ...
    async def stop(self, grace_s: float) -> None: ...
    def release(self) -> None: ...


class RayWorker:
    """A `Worker` of the supervisor. Each run has a new place, which `place` reserves."""

    def __init__(
        self,
        config: WorkerConfig,
        place: Callable[[], Placement],
        router: WorkerList,
        show: Callable[[str], None],
        on_pending: Callable[[], None],
    ) -> None:
        self._config = config
        self._place = place
        self._router = router
        self._show = show
        self._on_pending = on_pending
        self._placed: Placement | None = None

    async def run(self, on_ready: Callable[[str], None]) -> End:
        self._placed = placed = self._place()
        end = await self._until_end(placed, on_ready)
        placed.release()
        self._placed = None
        return end

    async def stop(self, grace_s: float) -> None:
        if self._placed is not None:
            await self._placed.stop(grace_s)

    def kill(self) -> None:
        if self._placed is not None:
            self._placed.release()

    async def _until_end(self, placed: Placement, on_ready: Callable[[str], None]) -> End:
        pending = asyncio.get_running_loop().call_later(PENDING_S, self._on_pending)
        serving: asyncio.Task[None] | None = None
        try:
            async for event in placed.run(self._config):
                pending.cancel()
                match event:
                    case {"address": [host, port, *_]}:
                        serving = asyncio.create_task(self._serve(placed, host, port, on_ready))
                    case {"lines": lines}:
                        for line in lines:
                            self._show(line)
                    case {"status": status}:
                        return End(status)
            return End(None, "was lost: its events ended without a status")
        except LostError as error:
            return End(None, f"was lost: {error}")
        except StartError as error:
            return End(1, f"cannot run on its node: {error}")
        finally:
            pending.cancel()
            if serving is not None:
                serving.cancel()

    async def _serve(
        self, placed: Placement, host: str, port: int, on_ready: Callable[[str], None]
    ) -> None:
        """Adds the worker to the rotation when it is healthy, and removes it when cancelled. Gives up its place if it then
        stops answering."""
        await until_healthy(host, port)
        url = f"http://{with_port(host, port)}"
        with suppress(RouterError):  # an operator may have added it
            self._router.add_worker(url)
        try:
            on_ready(url)
            await until_silent(host, port, self._config.watchdog_timeout, self._show)
            placed.release()
            await asyncio.Future()  # its events end
        finally:
            with suppress(RouterError):  # the router may have been stopped
                self._router.remove_worker(url)
