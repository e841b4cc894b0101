"""The steps of a kernel of attention among the nodes of trees of drafts (`tree_tail.py`).

    sees, exists = visible_nodes(visible + row_of_the_step, is_row, KEYS, BLOCK_KEYS)
    scores = ...  # of keys that exist, to base 2
    weights, total, lse = weigh_nodes(scores, sees)
    result = weights @ values / total

`begin_tail` has the common part of their launches.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.attention.merge_parts import Parts, partial_results
from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.pdl import launch_options


def begin_tail(tail: TreeTail, out: Tensor) -> tuple[Parts, dict[str, Any]]:
    """Returns memory for the results of the keys of `tail`, for `out` [B, H, V], and the options of the launch."""
    assert tail.schedule is not None, "a tail that is not planned for a GPU"
    rows = out.shape[1] * tail.queries
    options = {
        "HEADS": out.shape[1],
        "QUERIES": tail.queries,
        "KEYS": tail.keys,
        "BLOCK_KEYS": max(16, triton.next_power_of_2(tail.keys)),
        "num_warps": 4,
        **launch_options(),
    }
    return Parts(*partial_results(tail.schedule, out, rows), tail.schedule), options


@triton.jit
def visible_nodes(masks, is_row, KEYS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Returns whether each of N rows, with its mask at `masks` [N, 1], sees each node of its request, [N, BLOCK_KEYS],
    and whether any row sees a node, [BLOCK_KEYS, 1]. Keys that no row sees may be of another step, and NaN."""
    node = tl.arange(0, BLOCK_KEYS)[None, :]
    bits = tl.load(masks, is_row, other=0)
    sees = ((bits >> node.to(tl.int64)) & 1 != 0) & (node < KEYS)
    return sees, (tl.max(sees.to(tl.int32), 0) > 0)[:, None]


@triton.jit
def weigh_nodes(scores, sees):
    """Returns the weights [N, BLOCK_KEYS] of scores to base 2, their sums [N], 1 for a row that sees nothing, and the
    log-sum-exps [N] to base 2."""
    scores = tl.where(sees, scores, float("-inf"))
    maximum = tl.max(scores, 1)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    weights = tl.exp2(scores - maximum[:, None])
    total = tl.sum(weights, 1)
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    return weights, total, tl.where(none, float("-inf"), maximum + tl.log2(total))
