"""The groups of a rank, if the ranks that share a model divide its parts in different ways.

The `size` ranks are `dp_size` DP ranks of consecutive ranks each. The ranks of a DP rank have the same rows and divide
all but the routed experts. All ranks together divide those, and exchange their rows there.
"""

from __future__ import annotations

from typing import NamedTuple

from mla_router.worker.kernels.comm.connect import Meeting
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
        meeting: Meeting,
        *,
        dp_size: int = 1,
        all_to_all: bool = False,
    ) -> Groups:
        """Waits for the other ranks and returns the groups of `rank`, one of `size`, a multiple of `dp_size`. `all_to_all`:
        of the exchange. Errors: those of `Group.join`."""
        each, remainder = divmod(size, dp_size)
        assert not remainder, f"{size} ranks in {dp_size} equal parts"
        dp_rank, place = divmod(rank, each)

        attention = Group.join(place, each, meeting, name=f"attention {dp_rank}")
        exchange = Group.join(
            dp_rank, dp_size, meeting, name=f"exchange {place}", all_to_all=all_to_all
        )
        return cls(attention, exchange, all_to_all)

    @property
    def rank(self) -> int:
        """The number of this rank among all that share the model."""
        return self.exchange.rank * self.attention.size + self.attention.rank

    @property
    def size(self) -> int:
        return self.exchange.size * self.attention.size


ONE_RANK = Groups()
