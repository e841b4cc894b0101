"""The launcher's side of Ray: its connection to the cluster, placement groups and actors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mla_router import __version__
from mla_router.launch.ray.actor import WorkerActor
from mla_router.launch.supervisor import GaveUpError
from mla_router.worker.config import WorkerConfig, with_port

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
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0].rstrip(".")
            raise ClusterError(
                f"--ray-address {address}: {reason}; start a node on this machine with `ray start`"
            ) from error

    def close(self) -> None:
        ray.shutdown()

    def has_gpus(self) -> bool:
        return bool(ray.cluster_resources().get("GPU", 0))

    def place(self, resources: dict[str, float], nodes: int) -> Placed:
        """Reserves `resources` on each of `nodes` nodes. Does not wait: Ray places actors there when nodes have room."""
        return Placed(resources, nodes)


class Placed:
    """A placement group with one bundle on each of its nodes, and an actor in each bundle."""

    def __init__(self, resources: dict[str, float], nodes: int) -> None:
        self._is_running = False
        strategy = "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD"
        self._group = placement_group([resources] * nodes, strategy=strategy)
        self._actors = [
            ray.remote(WorkerActor)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, node),
            )
            .remote()
            for node in range(nodes)
        ]

    async def run(self, config: WorkerConfig) -> AsyncIterator[dict[str, Any]]:
        """Yields the events of `WorkerActor.run` of all nodes, up to the first `status`. Raises LostError, StartError.

        The actors of nodes other than 0 start when the address of node 0 is known."""
        events: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()

        async def follow(node: WorkerConfig) -> None:
            try:
                async for event in self._of_node(node):
                    events.put_nowait(event)
            except (LostError, StartError) as error:
                events.put_nowait(error)

        following = [asyncio.create_task(follow(config))]
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                if address := event.get("address"):
                    host, _, meeting = address
                    meet_at = with_port(host, meeting)
                    for rank in range(1, config.nnodes):
                        own = replace(config, node_rank=rank, dist_init_addr=meet_at)
                        following.append(asyncio.create_task(follow(own)))
                yield event
                if "status" in event:
                    return
        finally:
            for task in following:
                task.cancel()

    async def _of_node(self, config: WorkerConfig) -> AsyncIterator[dict[str, Any]]:
        run = self._actors[config.node_rank].run.options(num_returns="streaming")
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
                stopping = self._actors[0].stop.remote(grace_s)
                await asyncio.wait_for(stopping, grace_s + STOP_LIMIT_S)
        self.release()

    def release(self) -> None:
        """Ends the actors and the worker at once, and releases their resources."""
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)


def _check_reachable(address: str) -> None:
    """Raises OSError or ValueError if nothing listens at HOST:PORT. Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), REACH_LIMIT_S).close()


def _last_line(error: RayError) -> str:
    return str(error).strip().splitlines()[-1].strip()
