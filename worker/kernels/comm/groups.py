"""The groups of a rank, if the ranks that share a model divide its parts in different ways.

The `size` ranks are `dp_size` DP ranks of consecutive ranks each. The ranks of a DP rank have the same rows and divide
all but the routed experts. All ranks together divide those, and exchange their rows there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._C._distributed_c10d import Store

from mla_router.worker.kernels.comm.connect import LOOPBACK
from mla_router.worker.kernels.comm.group import Group


class Groups(NamedTuple):
    """The groups of one rank. Without DP attention there is one DP rank, with all ranks."""

    attention: Group = Group.alone()  # the ranks of the same DP rank
    exchange: Group = Group.alone()  # one rank of each DP rank, by the number of the DP rank
    # Whether rows go only to the DP ranks that have their experts, where `exchange` can
    all_to_all: bool = False

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        store: Store,
        device: torch.device,
        *,
        dp_size: int = 1,
        timeout_s: float = 1800.0,
        address: str = LOOPBACK,
        shares_memory: bool = True,
        all_to_all: bool = False,
    ) -> Groups:
        """Waits for the other ranks and returns the groups of `rank`, one of `size`, a multiple of `dp_size`. `all_to_all`:
        of the exchange. Other arguments, and errors: those of `Group.join`."""
        each, remainder = divmod(size, dp_size)
        assert not remainder, f"{size} ranks in {dp_size} equal parts"
        dp_rank, place = divmod(rank, each)

        def join(name: str, own: int, count: int, all_to_all: bool = False) -> Group:
            return Group.join(
                own,
                count,
                store,
                device,
                timeout_s=timeout_s,
                name=name,
                address=address,
                shares_memory=shares_memory,
                all_to_all=all_to_all,
            )

        return cls(
            join(f"attention {dp_rank}", place, each),
            join(f"exchange {place}", dp_rank, dp_size, all_to_all),
            all_to_all,
        )

    @property
    def rank(self) -> int:
        """The number of this rank among all that share the model."""
        return self.exchange.rank * self.attention.size + self.attention.rank

    @property
    def size(self) -> int:
        return self.exchange.size * self.attention.size


ONE_RANK = Groups()
