"""Flash attention of ragged chunks for Hopper's tensor cores (sm_90), in Gluon.

A program is nine warps. One warp copies tiles of queries, keys and values to shared memory (`rings.py`), ahead of two
warpgroups of four warps that multiply them, each for half of a block of 128 queries (`hopper_consumer.py`): warp
specialization, as in FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608, section 3.1). The copying warp gives
registers to the others. There is one program for each multiprocessor, and each takes tile after tile of a block and a
head: queries and keys of the next tile arrive while results of the last one are written.

Triton's own language cannot express this: compiled code of `kernel.py` waits for each product before the next.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_router.worker.kernels.attention.prefill_work import TALL_BLOCK, PrefillWork
from mla_router.worker.kernels.attention.ragged_attention.hopper_consumer import (
    consume,
    key_blocks,
    tile_in,
    work_of,
)
from mla_router.worker.kernels.attention.ragged_attention.rings import fill, new_ring
from mla_router.worker.kernels.attention.ragged_attention.tiling import NARROW
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.dispatch import is_hopper

# Keys of a tile. Sums of wide heads take half of a consumer's registers, and their tiles twice as much shared memory
BLOCK_KEYS, BLOCK_KEYS_OF_WIDE_HEADS = 128, 64
STAGES = 2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # of a thread
WIDTHS = (64, 128, 256)  # sizes of the parts of a head
_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def suits_hopper(
    q: Tensor, k: Tensor, v: Tensor, shared_keys: Tensor | None, work: PrefillWork
) -> bool:
    """Whether `ragged_attention_hopper` serves the call: on Hopper, with tall blocks, heads of up to 256 numbers in
    parts of 64, 128 or 256, and rows and heads that begin at multiples of 16 bytes."""
    if work.block_queries != TALL_BLOCK or not work.num_keys or not is_hopper(q.device):
        return False
    parts = _parts(q, k, shared_keys)
    widths = [v.shape[-1], *(part.shape[-1] for part in parts if part is not None)]
    tensors = [q, v, *(part for part in parts if part is not None)]
    if q.shape[-1] > max(WIDTHS) or any(width not in WIDTHS for width in widths):
        return False
    return all(
        tensor.stride(-1) == 1
        and tensor.dtype == q.dtype
        and tensor.data_ptr() % 16 == 0
        and all(stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )


def ragged_attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_keys: Tensor | None,
    work: PrefillWork,
    *,
    scale: float,
    out: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`ragged_attention` of operands that `suits_hopper`. Products are of the tensors' dtype, sums are float32."""
    num_queries, heads, _ = q.shape
    k, others = _parts(q, k, shared_keys)
    d, v_width = k.shape[-1], v.shape[-1]
    if out is None:
        out = q.new_empty(num_queries, heads, v_width)
    lse = q.new_empty(num_queries, heads, dtype=torch.float32)
    half = TALL_BLOCK // 2
    is_wide = max(q.shape[-1], v_width) > NARROW
    block_keys = BLOCK_KEYS_OF_WIDE_HEADS if is_wide else BLOCK_KEYS
    tiles = len(work.query_blocks) * heads
    programs = min(limits(q.device).multiprocessors, tiles)
    _ragged_attention[(programs,)](
        _tiles(q, half, d),
        None if others is None else _tiles(q, half, others.shape[-1]),
        _tiles(k, block_keys, d),
        None if others is None else _tiles(others, block_keys, others.shape[-1]),
        _tiles(v, block_keys, v_width),
        out,
        lse,
        work.query_blocks,
        tiles,
        programs,
        scale * math.log2(math.e),
        HEADS=heads,
        SHARE=heads // k.shape[1],
        Q_HEAD=q.stride(1),
        K_HEAD=k.stride(1),
        OTHERS_HEAD=0 if others is None or others.dim() == 2 else others.stride(1),
        V_HEAD=v.stride(1),
        BLOCK_M=TALL_BLOCK,
        STAGES=STAGES,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        WINDOW=work.window,
        CAP=None if softcap is None else softcap * math.log2(math.e),
        num_warps=4,
    )
    return out, lse


def _parts(q: Tensor, k: Tensor, shared_keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the two parts of keys: a head's own numbers and the shared ones; or 128 of its own and the rest."""
    if shared_keys is not None:
        return k, shared_keys
    return (k, None) if q.shape[-1] in WIDTHS else (k[..., :128], k[..., 128:])


def _tiles(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Returns a descriptor of x [N, heads, width] or [N, width] as a matrix, with all heads side by side."""
    layout = _layout(rows, width, x.dtype)
    return TensorDescriptor(x, [len(x), x.stride(0)], [x.stride(0), 1], [rows, width], layout)


@cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, width], _ELEMENTS[dtype])


@gluon.jit
def _produce(
    rings,
    sources,
    work,
    HEADS: gl.constexpr,
    SHARE: gl.constexpr,
    Q_HEAD: gl.constexpr,
    K_HEAD: gl.constexpr,
    OTHERS_HEAD: gl.constexpr,
    V_HEAD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Fills `rings` from `sources`, tile after tile of this program."""
    first_queries, last_queries, keys, values = rings
    q, q_others, k, others, v = sources
    query_blocks, tiles, programs = work
    BLOCK_N: gl.constexpr = keys.tiles.shape[1]
    D: gl.constexpr = keys.tiles.shape[2]
    step, round_, tile = 0, 0, gl.program_id(0)
    while tile < tiles:
        query_row, num_queries, key_row, first_sees, num_keys = work_of(query_blocks, tile, HEADS)
        end, blocks, _, _ = key_blocks(first_sees, num_queries, num_keys, BLOCK_M, BLOCK_N, WINDOW)
        head = tile % HEADS
        group = head // SHARE
        column = head * Q_HEAD
        for i in range(blocks):
            row = key_row + (end - 1 - i) * BLOCK_N
            fill(keys, step, k, group * K_HEAD, others, group * OTHERS_HEAD, row)
            if i == 0:  # after the keys: their memory is free before the memory of the last queries
                fill(first_queries, round_, q, column, q_others, column + D, query_row)
                row_of_last = query_row + BLOCK_M // 2
                fill(last_queries, round_, q, column, q_others, column + D, row_of_last)
            fill(values, step, v, group * V_HEAD, None, 0, row)
            step += 1
        round_ += 1
        tile = tile_in(round_, programs)


@gluon.jit(do_not_specialize=["tiles", "programs"])
def _ragged_attention(
    q,
    q_others,
    k,
    others,
    v,
    out,
    lse,
    query_blocks,
    tiles,
    programs,
    scale_log2,
    HEADS: gl.constexpr,
    SHARE: gl.constexpr,
    Q_HEAD: gl.constexpr,
    K_HEAD: gl.constexpr,
    OTHERS_HEAD: gl.constexpr,
    V_HEAD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP: gl.constexpr,
):
    """`q_others` and `others` are the second parts of queries and keys, None if there are none."""
    TWO_PARTS: gl.constexpr = others is not None
    keys = new_ring(k, others, STAGES, 2)
    values = new_ring(v, None, STAGES, 2)
    first_queries = new_ring(q, q_others, 1, 1)
    last_queries = new_ring(q, q_others, 1, 1)
    work = query_blocks, tiles, programs
    shared = keys, values, out, lse, scale_log2
    gl.warp_specialize(
        [
            (consume, (first_queries, 0, shared, work, HEADS, BLOCK_M, TWO_PARTS, WINDOW, CAP)),
            (
                consume,
                (last_queries, BLOCK_M // 2, shared, work, HEADS, BLOCK_M, TWO_PARTS, WINDOW, CAP),
            ),
            (
                _produce,
                (
                    (first_queries, last_queries, keys, values),
                    (q, q_others, k, others, v),
                    work,
                    HEADS,
                    SHARE,
                    Q_HEAD,
                    K_HEAD,
                    OTHERS_HEAD,
                    V_HEAD,
                    BLOCK_M,
                    WINDOW,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
