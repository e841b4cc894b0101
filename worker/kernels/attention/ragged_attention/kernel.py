"""Flash attention of ragged chunks, forward only, in Triton.

FlashAttention-2 (Dao, 2023, arXiv:2307.08691): a program keeps a block of one head's queries, walks
over the keys once, and rescales its sums at each larger score. Scores are to base 2. Keys that all queries of the
block attend to come first, without masks, then the few others. With a window, keys before the window of all queries
are not read, and keys before the window of some are masked as well.

A key is multiplied in two parts: the head's own and the shared one. Without a shared part they are the largest power
of two within head_dim and the rest, so that 192 is not padded to 256.

Unmasked keys and values are read by the tensor memory accelerator.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_router.worker.kernels.attention.prefill_work import PrefillWork
from mla_router.worker.kernels.attention.ragged_attention.tiling import Tiling, padded, tiling
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.softcap import tanh_of


@triton.jit
def _load(pointers, in_rows, in_columns, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    if MASK_ROWS and MASK_COLUMNS:
        tile = tl.load(pointers, mask=in_rows[:, None] & in_columns[None, :], other=0.0)
    elif MASK_ROWS:
        tile = tl.load(pointers, mask=in_rows[:, None], other=0.0)
    elif MASK_COLUMNS:
        tile = tl.load(pointers, mask=in_columns[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _load_rows(
    source, row, tile, in_rows, in_columns, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr
):
    """Returns the rows of one head that begin at `row`. `source`: a pointer to row 0 of the head, the stride of rows, the
    descriptor of `_tiles` or None, and the head's first column in that. `tile`: offsets [rows, columns] from a row."""
    pointer, stride, tiles, first_column = source
    if MASK_ROWS or tiles is None:
        loaded = _load(pointer + row * stride + tile, in_rows, in_columns, MASK_ROWS, MASK_COLUMNS)
    else:
        loaded = tiles.load([row.to(tl.int32), first_column])
    return loaded


@triton.jit
def _walk(
    acc,
    row_max,
    row_sum,
    q,
    q_shared,
    first,
    last,
    key_start,
    num_keys,
    seen,  # [BLOCK_M], the number of keys up to each query
    outside,  # [BLOCK_M], the number of positions before the window of each query
    k,
    v,
    shared,
    scale_log2,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attends to keys [first, last) of the chunk whose key 0 is in row key_start. `k`, `v` and `shared` are sources of
    `_load_rows`."""
    columns = tl.arange(0, BLOCK_N)
    d, v_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    k_tile = columns[:, None] * k[1] + d[None, :]
    v_tile = columns[:, None] * v[1] + v_columns[None, :]
    for start in tl.range(first, last, BLOCK_N):
        inside = start + columns < num_keys
        row = key_start + start  # int64
        keys = _load_rows(k, row, k_tile, inside, d < D, MASKED, D != BLOCK_D)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        if R > 0:
            r = tl.arange(0, BLOCK_R)
            shared_tile = columns[:, None] * shared[1] + r[None, :]
            others = _load_rows(shared, row, shared_tile, inside, r < R, MASKED, R != BLOCK_R)
            scores = tl.dot(q_shared, tl.trans(others), scores, input_precision=PRECISION)
        factor = scale_log2
        if CAP is not None:
            scores, factor = tanh_of(scores, scale_log2 / CAP, q.dtype == tl.float32), CAP
        if MASKED:
            key = (start + columns)[None, :]
            visible = key < seen[:, None]
            if WINDOW is not None:
                visible = visible & (key >= outside[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        base = new_max
        if MASKED and WINDOW is not None:  # a row may have seen no key yet
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        values = _load_rows(v, row, v_tile, inside, v_columns < V, MASKED, V != BLOCK_V)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _ragged_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    shared_ptr,
    k_tiles,
    v_tiles,
    shared_tiles,
    out_ptr,
    lse_ptr,
    query_blocks_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    shared_stride,
    shared_head_stride,
    out_stride,
    num_heads,
    scale_log2,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """CAP is the soft cap of scores to base 2."""
    # Neighbouring programs are heads of one block of queries: they read the same keys at the same time.
    block = query_blocks_ptr + 5 * (tl.program_id(0) // num_heads)
    head = tl.program_id(0) % num_heads
    num_queries = tl.load(block + 1)
    if num_queries <= 0:
        return
    query_row = tl.load(block).to(tl.int64)
    key_start = tl.load(block + 2).to(tl.int64)
    first_sees = tl.load(block + 3)
    num_keys = tl.load(block + 4)

    m = tl.arange(0, BLOCK_M)
    d, r, v_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    is_query = m < num_queries
    q_rows = q_ptr + query_row * q_stride + head * q_head_stride + m[:, None] * q_stride
    q = _load(q_rows + d[None, :], is_query, d < D, True, D != BLOCK_D)
    q_shared = q
    if R > 0:
        q_shared = _load(q_rows + (D + r)[None, :], is_query, r < R, True, R != BLOCK_R)

    seen = tl.minimum(first_sees + m, num_keys)
    last = tl.minimum(first_sees + BLOCK_M - 1, num_keys)
    # Keys [full, masked) are those that all queries of the block attend to
    first, full, outside = 0, 0, seen
    masked = tl.minimum(first_sees, num_keys) // BLOCK_N * BLOCK_N
    if WINDOW is not None:
        outside = first_sees + m - WINDOW
        first = tl.maximum(first_sees - WINDOW, 0) // BLOCK_N * BLOCK_N
        masked = tl.maximum(masked, first)
        most_outside = first_sees + tl.minimum(BLOCK_M, num_queries) - 1 - WINDOW
        full = tl.minimum(tl.cdiv(tl.maximum(most_outside, first), BLOCK_N) * BLOCK_N, masked)
    begins, ends = (first, full, masked), (full, masked, last)
    FIRST: tl.constexpr = 1 if WINDOW is None else 0

    k_column = head // SHARE * k_head_stride
    v_column = head // SHARE * v_head_stride
    shared_column = head // SHARE * shared_head_stride
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(FIRST, 3):
        acc, row_max, row_sum = _walk(
            acc,
            row_max,
            row_sum,
            q,
            q_shared,
            begins[part],
            ends[part],
            key_start,
            num_keys,
            seen,
            outside,
            (k_ptr + k_column, k_stride, k_tiles, k_column.to(tl.int32)),
            (v_ptr + v_column, v_stride, v_tiles, v_column.to(tl.int32)),
            (shared_ptr + shared_column, shared_stride, shared_tiles, shared_column.to(tl.int32)),
            scale_log2,
            MASKED=part != 1,
            D=D,
            R=R,
            V=V,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
            BLOCK_R=BLOCK_R,
            BLOCK_V=BLOCK_V,
            PRECISION=PRECISION,
            WINDOW=WINDOW,
            CAP=CAP,
        )
    # A row without keys is 0, with the weight 0
    out = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    out_rows = out_ptr + query_row * out_stride + head * V + m[:, None] * out_stride
    tl.store(
        out_rows + v_columns[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_query[:, None] & (v_columns < V)[None, :],
    )
    lse = row_max + tl.log2(row_sum)  # -inf without a key
    tl.store(lse_ptr + (query_row + m) * num_heads + head, lse, mask=is_query)


def ragged_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_keys: Tensor | None,
    work: PrefillWork,
    *,
    scale: float,
    out: Tensor | None = None,
    softcap: float | None = None,
    tiles: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """`ragged_attention`. Products are of the tensors' dtype, sums are float32. `tiles` replaces `tiling`, for
    benchmarks."""
    (num_queries, heads, width), (_, groups, d), v_width = q.shape, k.shape, v.shape[-1]
    if shared_keys is None:
        d = d if d <= 16 else 1 << (d.bit_length() - 1)
        k, shared, shared_head_stride = k[..., :d], k[..., d:], k.stride(1)
    else:
        shared, shared_head_stride = shared_keys, 0
    r = width - d
    for tensor in (q, k, v, shared):
        assert tensor.stride(-1) == 1 and tensor.dtype == q.dtype, (
            f"strides {tensor.stride()}, {tensor.dtype} beside {q.dtype}"
        )
    if out is None:
        out = q.new_empty(num_queries, heads, v_width)
    lse = q.new_empty(num_queries, heads, dtype=torch.float32)
    programs = work.query_blocks.shape[0] * heads
    on = limits(q.device)
    tiles = tiles or tiling(
        work.block_queries,
        q.element_size(),
        programs,
        head_dim=width,
        v_head_dim=v_width,
        on=on,
    )
    _ragged_attention[(programs,)](
        q,
        k,
        v,
        shared,
        *(
            _tiles(part, columns, tiles.block_keys) if on.has_tensor_memory_accelerator else None
            for part, columns in ((k, d), (v, v_width), (shared, r))
        ),
        out,
        lse,
        work.query_blocks,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        shared.stride(0),
        shared_head_stride,
        out.stride(0),
        heads,
        scale * math.log2(math.e),
        SHARE=heads // groups,
        D=d,
        R=r,
        V=v_width,
        BLOCK_M=work.block_queries,
        BLOCK_N=tiles.block_keys,
        BLOCK_D=padded(d),
        BLOCK_R=padded(r),
        BLOCK_V=padded(v_width),
        PRECISION="ieee",
        WINDOW=work.window,
        CAP=None if softcap is None else softcap * math.log2(math.e),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out, lse


def _tiles(x: Tensor, width: int, rows: int) -> TensorDescriptor | None:
    """Returns a descriptor of x [N, heads, width] for the tensor memory accelerator: a matrix with all heads side by
    side, read in tiles of `rows` rows of one head. None if x is empty, or if rows or heads do not begin at multiples
    of 16 bytes."""
    apart = [stride * x.element_size() for stride in x.stride()[:-1]]
    if width != padded(width) or not len(x) or any(at % 16 for at in (x.data_ptr(), *apart)):
        return None
    return TensorDescriptor(x, [len(x), x.stride(0)], [x.stride(0), 1], [rows, width])
