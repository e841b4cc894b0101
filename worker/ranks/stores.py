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
from mla_router.worker.nodes.messages import Meeting
from mla_router.worker.ranks.errors import RanksError


@dataclass(frozen=True)
class Place:
    """The place where the ranks meet.

    `descriptor`: of the memory; of the listening socket of the TCPStore, on node 0; None on other nodes.
    `meeting`: with several nodes. `address`: the own address in the network of the ranks.
    """

    descriptor: int | None
    meeting: Meeting | None = None
    address: str = LOOPBACK

    def open(self, rank: int, timeout_s: float) -> Store:
        """Returns the store. Raises RanksError if that of rank 0 on another node cannot be reached."""
        meeting = self.meeting
        if meeting is None:
            # -1: several groups use the file, none of which may remove it
            return FileStore(f"/proc/self/fd/{self.descriptor}", -1)
        serves = rank == 0
        if self.descriptor is not None and not serves:
            os.close(self.descriptor)  # else the port stays open when rank 0 ends
        try:
            store = TCPStore(
                meeting.store_host,
                meeting.store_port,
                is_master=serves,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=self.descriptor if serves else None,
            )
        except RuntimeError as error:
            raise RanksError(
                f"the store of rank 0 at {meeting.store_host} port {meeting.store_port} cannot be reached from rank {rank}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        # So that no rank of an earlier start is taken for one of this start
        return PrefixStore(meeting.session, store)
