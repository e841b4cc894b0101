"""The trees of drafts of all slots, on the device between steps."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.kernels.kv_cache.tree_rows import Trees, look_up_nodes
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.result import UNUSED


class TreeState:
    """The shape of the tree of each slot, the idle slot included. The tokens of the nodes are in `SlotState.drafts`."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        assert capacity.tree is not None, f"{capacity}"
        self.shape = capacity.tree
        slots, nodes = capacity.num_slots + 1, self.shape.nodes
        # Cache rows of nodes, after the pages of requests (`KVCachePool`)
        self.first_row = (capacity.num_pages + 1) * capacity.page_size

        def zeros() -> Tensor:
            return torch.zeros(slots, nodes, dtype=torch.int64, device=device)

        # At first all nodes are children of the root, so that the nodes of a slot without room are idle
        self.trees = Trees(zeros(), zeros(), zeros())
        self.trees.depths[:, 1:] = 1
        self.trees.ancestors[:] = 1 | 1 << torch.arange(nodes, device=device)
        # Of the rows of a step, as graphs read them
        self._visible = torch.zeros(capacity.num_slots * nodes, dtype=torch.int64, device=device)

    def look_up(
        self,
        rows: Tensor,
        kinds: Tensor,
        last_token: Tensor,
        drafts: Tensor,
        lengths: Tensor,
        into: LookedUp,
    ) -> None:
        """Writes the inputs of the nodes among `rows` to `into` (`look_up_nodes`), and the nodes that they see, for
        `tail`."""
        count = min(rows.shape[1], len(self._visible))
        look_up_nodes(
            rows[:, :count],
            kinds[:count],
            self.trees,
            last_token,
            drafts,
            lengths,
            self.first_row,
            self._visible,
            LookedUp(*(tensor[:count] for tensor in into)),
        )

    def tail(self, rows: int) -> TreeTail:
        """Returns the attention among the nodes of the first `rows` rows of the step that was looked up last."""
        nodes = self.shape.nodes
        return TreeTail(self._visible[:rows], nodes, nodes, self.first_row)

    def chains(self, slots: Tensor, drafts: Tensor) -> Tensor:
        """Returns the tokens of the chain of best nodes after the root of each of `slots` [S] int64, [S, depth] int64,
        with UNUSED after the last one. `drafts` [S, N - 1] int64: of all nodes. Such a chain has the first numbers."""
        most = min(self.shape.depth, self.shape.nodes - 1)
        before = torch.arange(most, device=slots.device)
        follows = self.trees.parents[slots, 1 : most + 1] == before
        return torch.where(follows.cumprod(dim=1) > 0, drafts[:, :most], UNUSED)
