"""What `launch_server` is to start: a parsed and checked command line (`arguments.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mla_router.worker.config import WorkerConfig
from mla_router.worker.host import default_server_processes
from mla_router.worker.host_limits import usable_cores
from mla_router.worker.nodes.secret import derive

# Clients reach workers only through the router.
WORKER_HOST = "127.0.0.1"

FlagValue = str | list[str] | bool


@dataclass(frozen=True)
class Options:
    """The settings of the launcher, of its router and of its workers."""

    host: str
    port: int
    dp_size: int
    worker_base_port: int
    router_flags: Mapping[str, FlagValue]  # by the router's names: {"policy": "round_robin"}
    every_worker: WorkerConfig  # the common settings of all workers
    without_effect: Sequence[str] = ()  # flags without effect, with the reasons
    ray_address: str = ""  # of the Ray cluster for the workers; empty: they run on this machine

    @property
    def workers_here(self) -> range:
        """The workers on this node: all, but with --nnodes and DP attention its DP ranks."""
        common = self.every_worker
        return common.dp_ranks_here if common.attn_dp_size > 1 else range(self.dp_size)

    @property
    def spans_nodes(self) -> bool:
        """Whether workers are on several nodes of --nnodes, as with DP attention."""
        return self.every_worker.nnodes > 1 and self.every_worker.attn_dp_size > 1

    def shared_key(self, purpose: str) -> str:
        """Returns a key for this purpose that all nodes of --nnodes know, and nobody without their secret."""
        return derive(self.every_worker.dist_key, purpose).hex()

    def worker(self, index: int, port: int, host: str = WORKER_HOST) -> WorkerConfig:
        """Returns the settings of one worker: its address, its devices, its share of the cores."""
        common = self.every_worker
        cores = max(1, usable_cores() // len(self.workers_here))
        place = index - self.workers_here.start
        return dataclasses.replace(
            common,
            host=host,
            port=port,
            worker_id=f"worker-{index}",
            attn_dp_rank=index if common.attn_dp_size > 1 else 0,
            base_gpu_id=common.base_gpu_id + place * len(common.ranks_here),
            cpu_threads=common.cpu_threads or max(1, cores // len(common.ranks_here)),
            tokenizer_worker_num=common.tokenizer_worker_num
            or default_server_processes(common.device, cores),
        )

    def ray_worker(self, index: int, device: str) -> WorkerConfig:
        """Returns the settings of one worker on a Ray node: Ray chooses its GPUs, which are the only ones it sees."""
        return dataclasses.replace(
            self.every_worker,
            worker_id=f"worker-{index}",
            device=device,
            cpu_threads=self.every_worker.cpu_threads or (1 if device == "cpu" else 0),
        )

    def router_argv(self, worker_urls: Sequence[str]) -> list[str]:
        argv = [f"--host={self.host}", f"--port={self.port}"]
        argv.append(f"--replay-key={self.every_worker.replay_key}")
        if self.every_worker.api_key:
            argv.append(f"--api-key={self.every_worker.api_key}")
        if admin_key := self.every_worker.admin_api_key:
            argv += [f"--admin-api-key={admin_key}", f"--worker-admin-api-key={admin_key}"]
        for name, value in self.router_flags.items():
            if isinstance(value, list):
                argv += [f"--{name}", *value]
            else:
                argv.append(f"--{name}" if value is True else f"--{name}={value}")
        return [*argv, "--worker-urls", *worker_urls]
