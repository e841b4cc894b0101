"""The weighted sum of the results of each token's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.pdl import launch_options, wait_for_previous

# Maximum number of tokens whose rows are read before their weights are known. Of more, rows with weight 0 are not read:
# with expert parallelism they are most rows.
READS_ALL = 64
# Of a program. On an H200 sums of 7,168 columns of which one expert in 8 is here take 15.5 us for 1,024 tokens, and 218
# for 16,384; programs of 512 columns take 18.5 and 278
COLUMNS = 1024


class Term(NamedTuple):
    """A term of the sums of R successive tokens."""

    rows: Tensor  # [R, N], contiguous
    first: int = 0  # token of the first row

    def padded(self, tokens: int) -> Tensor:
        """Returns the term of `tokens` tokens: zeros for those that have none."""
        after = tokens - self.first - len(self.rows)
        if not self.first and not after:
            return self.rows
        return functional.pad(self.rows, (0, 0, self.first, after))


def combine(rows: Tensor, weights: Tensor, plus: Term | None = None) -> Tensor:
    """Returns the sum over k, in its order and in float32, of weights[t, k] * rows[t * K + k], [T, N], plus `plus`. A row
    with weight 0 may have any content."""
    tokens, top_k = weights.shape
    hidden = rows.shape[1]
    out = rows.new_empty(tokens, hidden)
    _combine[(tokens, triton.cdiv(hidden, COLUMNS))](
        rows,
        weights,
        plus and plus.rows,
        plus.first if plus else 0,
        len(plus.rows) if plus else 0,
        out,
        TOP_K=top_k,
        HIDDEN=hidden,
        BLOCK_N=COLUMNS,
        READS_ALL=tokens <= READS_ALL,
        num_warps=4,
        **launch_options(),
    )
    return out


def weighted_sum(rows: Tensor, weights: Tensor, plus: Callable[[], Term] | None = None) -> Tensor:
    """Returns plus() + the sum over k of weights[t, k] * rows[t, k], [T, N], in float32, then rounded to the dtype
    of rows [T, K, N]."""
    total = torch.einsum("tkn,tk->tn", rows.float(), weights)
    if plus is not None:
        total += plus().padded(len(total))
    return total.to(rows.dtype)


@triton.jit(do_not_specialize=["first", "count"])
def _combine(
    rows,
    weights,
    plus,
    first,
    count,
    out,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    READS_ALL: tl.constexpr,
):
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < HIDDEN
    total = tl.zeros((BLOCK_N,), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        share = tl.load(weights + pair)
        wanted = HIDDEN if READS_ALL else tl.where(share == 0, 0, HIDDEN)
        row = tl.load(rows + pair * HIDDEN + n, n < wanted, other=0.0).to(tl.float32)
        total += tl.where(share == 0, 0.0, share * row)
    if plus is not None:
        own = token - first
        has_term = (own >= 0) & (own < count)
        total += tl.load(plus + own * HIDDEN + n, inside & has_term, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + n, total.to(out.dtype.element_ty), inside)
