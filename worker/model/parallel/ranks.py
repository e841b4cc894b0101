"""The parts of a model that one of several ranks holds.

With tensor parallelism each rank has some of the heads, some columns of each feed-forward layer and some rows of the
head. With expert parallelism it has some of the routed experts, whole ones if there are as many expert ranks as ranks.
With DP attention all ranks divide the routed experts, and the ranks of each DP rank divide everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_router.worker.kernels.comm.groups import Groups
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.shard import Extent


@dataclass(frozen=True, slots=True)
class Share:
    """Part `index` of `count` parts, whose number follows from the flag `remedy`."""

    index: int
    count: int
    remedy: str = "--tp-size"

    def of(self, items: int, name: str) -> Extent:
        """Returns an equal share of `items`. Raises ModelError, with `name`."""
        if items % self.count:
            raise ModelError(
                f"{name}: {items} cannot be divided into {self.count} equal parts: change {self.remedy}"
            )
        each = items // self.count
        return Extent(self.index * each, each, items)

    def of_blocks(self, numbers: int, block: int, name: str) -> Extent:
        """Returns a share of `numbers` in blocks of `block`: equal parts if blocks have one number, otherwise parts that
        differ by at most one block. Raises ModelError, with `name`."""
        if block == 1:
            return self.of(numbers, name)
        blocks = -(-numbers // block)
        if blocks < self.count:
            raise ModelError(
                f"{name}: {numbers}, in blocks of {block} that share scales, cannot be divided into {self.count} parts: "
                f"change {self.remedy}"
            )
        edges = (self.index, self.index + 1)
        start, end = (min(blocks * edge // self.count * block, numbers) for edge in edges)
        return Extent(start, end - start, numbers)


class Ranks(NamedTuple):
    """Rank `rank` of `size` (--tp-size), which divide the routed experts into `expert_parts` parts (--ep-size).

    They are `dp_size` DP ranks (--dp-size), a divisor of `size`, each of consecutive ranks."""

    rank: int
    size: int
    expert_parts: int = 1
    dp_size: int = 1

    @classmethod
    def of(cls, groups: Groups, expert_parts: int = 1) -> Ranks:
        return cls(groups.rank, groups.size, expert_parts, groups.exchange.size)

    @property
    def attention(self) -> Share:
        """The share in the parts that the ranks of one DP rank divide: all but the routed experts."""
        each = self.size // self.dp_size
        return Share(self.rank % each, each)

    @property
    def experts(self) -> Share:
        return Share(self.rank // self._sharing, self.expert_parts, "--ep-size")

    @property
    def exchange_parts(self) -> list[int]:
        """The parts of the routed experts that the ranks of the exchange have, in the order of the DP ranks."""
        each = self.size // self.dp_size
        return [(each * dp + self.rank % each) // self._sharing for dp in range(self.dp_size)]

    @property
    def expert_columns(self) -> Share:
        """The share in the columns of each expert, which the ranks with the same experts divide."""
        return Share(self.rank % self._sharing, self._sharing, "--tp-size, or raise --ep-size")

    @property
    def _sharing(self) -> int:
        """Ranks that hold the same experts."""
        return self.size // self.expert_parts

    def kv_heads(self, heads: int) -> Share:
        """Returns the share in KV heads. If there are fewer than ranks, several ranks have the same one."""
        own = self.attention
        if own.count % heads:
            return own
        return Share(own.index * heads // own.count, heads)
