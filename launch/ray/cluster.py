"""The launcher's side of Ray: its connection to the cluster, placement groups and actors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mla_router import __version__
from mla_router.launch.ray.actor import WorkerActor
from mla_router.launch.supervisor import GaveUpError
from mla_router.worker.config import WorkerConfig

REACH_LIMIT_S = 5.0
STOP_LIMIT_S = 2.0  # for Ray's own part of a stop


class ClusterError(GaveUpError):
    """There is no cluster at --ray-address."""


class LostError(RuntimeError):
    """Ray has lost the actor: its process or its node is dead, or unreachable."""


class StartError(RuntimeError):
    """The actor cannot run a worker on its node."""


class RayCluster:
    """A connection to the cluster. Its actors and placement groups end with it. Raises ClusterError."""

    def __init__(self, address: str) -> None:
        try:
            if address != "auto":
                _check_reachable(address)
            ray.init(address, log_to_driver=False, logging_level="ERROR")
        except (OSError, RayError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ClusterError(
                f"--ray-address {address}: {reason}; start a node on this machine with `ray start`"
            ) from error

    def close(self) -> None:
        ray.shutdown()

    def has_gpus(self) -> bool:
        return bool(ray.cluster_resources().get("GPU", 0))

    def place(self, resources: dict[str, float]) -> Placed:
        """Reserves `resources` on one node for an actor. Does not wait: Ray places it when a node has room."""
        return Placed(resources)


class Placed:
    """A placement group on one node, and an actor in it."""

    def __init__(self, resources: dict[str, float]) -> None:
        self._is_running = False
        self._group = placement_group([resources], strategy="STRICT_PACK")
        self._actor = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
            )
            .remote()
        )

    async def run(self, config: WorkerConfig) -> AsyncIterator[dict[str, Any]]:
        """Yields the events of `WorkerActor.run`. Raises LostError, StartError."""
        run = self._actor.run.options(num_returns="streaming")
        try:
            async for event in run.remote(__version__, asdict(config)):
                self._is_running = True
                yield await event
        except RayTaskError as error:
            raise StartError(str(error.cause)) from error
        except RayError as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise StartError(str(error)) from error
            raise LostError(_last_line(error)) from error

    async def stop(self, grace_s: float) -> None:
        """Stops the worker, then releases its resources. SIGKILL follows after `grace_s`."""
        if self._is_running:  # a pending actor does not answer
            with contextlib.suppress(RayError, TimeoutError):
                stopping = self._actor.stop.remote(grace_s)
                await asyncio.wait_for(stopping, grace_s + STOP_LIMIT_S)
        self.release()

    def release(self) -> None:
        """Ends the actor and the worker at once, and releases their resources."""
        with contextlib.suppress(RayError):
            ray.kill(self._actor)
            remove_placement_group(self._group)


def _check_reachable(address: str) -> None:
    """Raises OSError or ValueError if nothing listens at HOST:PORT. Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), REACH_LIMIT_S).close()


def _last_line(error: RayError) -> str:
    return str(error).strip().splitlines()[-1].strip()
