"""Merges the results of attention over two sets of keys.

The log-sum-exp of a row's scores is the weight of its result (FlashInfer, arXiv:2501.01005, section 2.2). Prefill
attends in several passes to more keys than fit into memory at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.dispatch import on_gpu

BLOCK_ROWS = 16


def merge_states(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Replaces `out` and `lse` by the result and the log-sum-exps over both sets of keys.

    out, other [N, H, V] contiguous, of one dtype; lse, other_lse [N, H] contiguous: log-sum-exps in
    base 2, -inf for a row without keys, whose `out` is not read. A row without keys in both sets becomes 0.
    """
    assert out.shape == other.shape and lse.shape == other_lse.shape == out.shape[:2], (
        f"out {tuple(out.shape)}, lse {tuple(lse.shape)}, other {tuple(other.shape)}, "
        f"other lse {tuple(other_lse.shape)}"
    )
    merge = merge_states_triton if on_gpu(out) else merge_states_torch
    merge(out, lse, other, other_lse)


def merge_states_torch(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    exact = torch.promote_types(out.dtype, torch.float32)
    both = torch.logaddexp2(lse, other_lse)

    def share(values: Tensor, own: Tensor) -> Tensor:
        weight = torch.exp2(own - both)[..., None]
        return torch.where(own[..., None] == float("-inf"), 0, values.to(exact) * weight)

    out.copy_(share(out, lse) + share(other, other_lse))
    lse.copy_(both)


@triton.jit
def _share(values, own, both):
    """Returns the weighted values; 0 for a row without keys, whose weight or values may be NaN."""
    return tl.where((own == float("-inf"))[:, None], 0.0, values * tl.exp2(own - both)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _merge_states(
    out_ptr,
    lse_ptr,
    other_ptr,
    other_lse_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_WIDTH)
    is_row = rows < num_rows
    lse = tl.load(lse_ptr + rows, mask=is_row, other=0.0)
    other_lse = tl.load(other_lse_ptr + rows, mask=is_row, other=0.0)
    larger = tl.maximum(lse, other_lse)
    distance = tl.where(larger == float("-inf"), 0.0, tl.minimum(lse, other_lse) - larger)
    both = larger + tl.log2(1.0 + tl.exp2(distance))

    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    places = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    out = tl.load(out_ptr + places, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(other_ptr + places, mask=mask, other=0.0).to(tl.float32)
    merged = _share(out, lse, both) + _share(other, other_lse, both)
    tl.store(out_ptr + places, merged.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + rows, both, mask=is_row)


def merge_states_triton(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    for tensor in (out, lse, other, other_lse):
        assert tensor.is_contiguous(), f"{tuple(tensor.shape)}, strides {tensor.stride()}"
    width = out.shape[-1]
    _merge_states[(triton.cdiv(lse.numel(), BLOCK_ROWS),)](
        out,
        lse,
        other,
        other_lse,
        lse.numel(),
        WIDTH=width,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_WIDTH=triton.next_power_of_2(width),
    )
