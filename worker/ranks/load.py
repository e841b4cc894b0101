"""Loads the engine of a rank."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine.choose import choose_device
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.kernels.comm.connect import LOOPBACK, Meeting
from mla_router.worker.kernels.comm.groups import ONE_RANK, Groups
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.ranks.channel import CallSender
from mla_router.worker.ranks.leader import Leader
from mla_router.worker.ranks.remote_calls import RemoteCalls, SessionKeys
from mla_router.worker.ranks.remote_mailbox import RemoteMailbox
from mla_router.worker.ranks.rendezvous import Rendezvous
from mla_router.worker.ranks.stores import StoreLocation
from mla_router.worker.step.engine import StepEngine

logger = logging.getLogger(__name__)


def load_rank(
    config: WorkerConfig, rank: int, store: Store | None, address: str = LOOPBACK
) -> Engine:
    """Returns the engine of `rank`, on the GPU with its place among the ranks of this node from --base-gpu-id.

    `store`: the store of the rendezvous, at which all ranks have arrived; None for one rank. `address`: that of this
    node for the other ranks. Raises ConfigError.
    """
    gpu = config.base_gpu_id + rank - config.ranks_here.start
    own = dataclasses.replace(config, base_gpu_id=gpu)
    groups = ONE_RANK
    if store is not None:
        device = choose_device(own)
        meeting = Meeting(
            store,
            device,
            timeout_s=config.dist_timeout,
            address=address,
            shares_memory=not config.disable_custom_all_reduce,
        )
        groups = Groups.join(
            rank,
            config.tp_size,
            meeting,
            dp_size=config.attn_dp_size,
            all_to_all=config.moe_a2a_backend == "direct" and config.ep_size > 1,
        )
        if device.type == "cuda":
            for group in (groups.attention, groups.exchange):
                if group.size > 1:
                    logger.info("exchange between ranks: %s", group.few_rows.choice)
    try:
        return load_engine(own, groups, expert_parts=config.ep_size)
    except ModelError as error:
        raise ConfigError(f"--model-path {config.folder}: {error}") from error


class LoadedLeader(NamedTuple):
    """The first rank of a worker, whose other ranks are loaded as well."""

    engine: Engine
    calls: StepEngine[Any]  # the engine, with the other ranks behind it
    mailbox: RemoteMailbox | None = None  # for the DP ranks on several nodes


def load_leader(
    config: WorkerConfig, ipc_dir: Path, location: StoreLocation | None
) -> LoadedLeader:
    """Loads the first rank of a worker, and waits for all ranks.

    `location`: the store of the rendezvous; None for one rank. Raises ConfigError, RanksError.
    """
    if location is None:
        engine = load_rank(config, 0, None)
        return LoadedLeader(engine, engine)
    first = config.ranks.start
    store = location.open(first, config.dist_timeout)
    rendezvous = arrive(config, first, store)
    remote = _open_remote(config, location, rendezvous)
    mailbox = _open_mailbox(config, location, rendezvous)
    rendezvous.all_arrived()
    sender = CallSender(ipc_dir, len(config.ranks_here), remote)
    if mailbox is not None:
        dp_ranks = set(range(mailbox.size)) - {mailbox.rank}
        endpoints = {rank: rendezvous.told(_mailbox_of(rank)) for rank in dp_ranks}
        mailbox.connect(endpoints, config.dist_timeout)
    engine = load_rank(config, first, store, location.address)
    rendezvous.report_loaded()
    rendezvous.all_loaded()
    if remote is not None:
        remote.wait_connected(config.dist_timeout)
    return LoadedLeader(engine, Leader(engine, sender), mailbox)


def arrive(config: WorkerConfig, rank: int, store: Store) -> Rendezvous:
    """Reports the arrival of `rank` in the store, and returns its view of the rendezvous."""
    return Rendezvous(
        store, rank, config.tp_size, timeout_s=config.dist_timeout, nodes=config.nnodes
    )


def endpoint_of(rank: int) -> str:
    """Returns the name under which rank 0 tells the address of the calls to `rank`."""
    return f"the address of calls to rank {rank}"


def _open_remote(
    config: WorkerConfig, location: StoreLocation, rendezvous: Rendezvous
) -> RemoteCalls | None:
    """Listens for the ranks of this worker on other nodes, and tells them the addresses; None without such ranks."""
    ranks = config.ranks[len(config.ranks_here) :]
    if location.session is None or not ranks:
        return None
    remote = RemoteCalls(location.address, ranks, SessionKeys(config.dist_key, location.session.id))
    for rank, endpoint in remote.endpoints.items():
        rendezvous.tell(endpoint_of(rank), endpoint)
    return remote


def _mailbox_of(dp_rank: int) -> str:
    return f"the address of messages to DP rank {dp_rank}"


def _open_mailbox(
    config: WorkerConfig, location: StoreLocation, rendezvous: Rendezvous
) -> RemoteMailbox | None:
    """Listens for the DP ranks on other nodes, and tells them the address; None on one machine."""
    if location.session is None or config.attn_dp_size == 1:
        return None
    keys = SessionKeys(config.dist_key, location.session.id)
    mailbox = RemoteMailbox(location.address, config.attn_dp_rank, config.attn_dp_size, keys)
    rendezvous.tell(_mailbox_of(mailbox.rank), mailbox.endpoint)
    return mailbox
