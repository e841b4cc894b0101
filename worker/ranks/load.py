"""Loads the engine of a rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.core import StepEngine
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import choose_device, load_engine
from mla_router.worker.kernels.comm.groups import ONE_RANK, Groups
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.ranks.channel import CallSender
from mla_router.worker.ranks.leader import Leader
from mla_router.worker.ranks.rendezvous import Rendezvous, store_path


def load_rank(config: WorkerConfig, rank: int, store: Path | None) -> Engine:
    """Returns the engine of `rank`, on the GPU with that offset from --base-gpu-id. `store`: the store of the rendezvous,
    at which all ranks have arrived; None for one rank. Raises ConfigError."""
    own = dataclasses.replace(config, base_gpu_id=config.base_gpu_id + rank)
    groups = ONE_RANK
    if store is not None:
        device = choose_device(own)
        groups = Groups.join(rank, config.tp_size, store, device, timeout_s=config.dist_timeout)
    try:
        return load_engine(own, groups, expert_parts=config.ep_size)
    except ModelError as error:
        raise ConfigError(f"--model-path {config.folder}: {error}") from error


def load_leader(
    config: WorkerConfig, ipc_dir: Path, store: int | None
) -> tuple[Engine, StepEngine[Any]]:
    """Loads rank 0, and waits for the other ranks. Returns its engine, and that engine with the others behind it.

    `store`: descriptor of the meeting; None for one rank. Raises ConfigError, RanksError.
    """
    if store is None:
        engine = load_rank(config, 0, None)
        return engine, engine
    path = store_path(store)
    rendezvous = Rendezvous(path, 0, config.tp_size, timeout_s=config.dist_timeout)
    rendezvous.all_arrived()
    sender = CallSender(ipc_dir, config.tp_size)
    engine = load_rank(config, 0, path)
    rendezvous.report_loaded()
    rendezvous.all_loaded()
    return engine, Leader(engine, sender)
