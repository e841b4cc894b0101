"""The store in which the ranks of a worker find each other: torch's FileStore on one machine, TCPStore on several.

The file is anonymous memory whose descriptor the processes inherit: it has no name and no port, and ends with them. The
process of rank 0 serves the TCPStore, on a socket that it inherits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from mla_router.worker.kernels.comm.connect import LOOPBACK
from mla_router.worker.nodes.messages import Session
from mla_router.worker.ranks.errors import RanksError


@dataclass(frozen=True)
class StoreLocation:
    """The location of the store of the rendezvous, for one process.

    `descriptor`: of the memory; of the listening socket of the TCPStore, on node 0; None on other nodes.
    `session`: with several nodes. `address`: the own address in the network of the ranks.
    """

    descriptor: int | None
    session: Session | None = None
    address: str = LOOPBACK

    def open(self, rank: int, timeout_s: float) -> Store:
        """Returns the store. Raises RanksError if that of rank 0 on another node cannot be reached."""
        session = self.session
        if session is None:
            # -1: several groups use the file, none of which may remove it
            return FileStore(f"/proc/self/fd/{self.descriptor}", -1)
        serves = rank == 0
        if self.descriptor is not None and not serves:
            os.close(self.descriptor)  # else the port stays open when rank 0 ends
        try:
            store = TCPStore(
                session.store_host,
                session.store_port,
                is_master=serves,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=self.descriptor if serves else None,
            )
        except RuntimeError as error:
            raise RanksError(
                f"the store of rank 0 at {session.store_host} port {session.store_port} cannot be reached from rank {rank}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        # So that no rank of an earlier start is taken for one of this start
        return PrefixStore(session.id, store)
