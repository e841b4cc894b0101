"""`rope_kv_write` and `absorb_queries` in one kernel: everything between the projections and the attention of an MLA
decode step.

Neither reads memory that the other writes: the first takes the rotary part of the queries and the token's cache row,
the second the rest of the queries. So they are two kinds of programs in one grid, which saves a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.attention.absorb import (
    absorb_program,
    absorb_queries,
    absorb_work,
    is_served,
    is_small,
)
from mla_router.worker.kernels.attention.absorb import tiling as absorb_tiling
from mla_router.worker.kernels.attention.absorb_quantized import StaticFP8
from mla_router.worker.kernels.dispatch import on_gpu
from mla_router.worker.kernels.kv_cache.rope_kv_write import (
    rope_kv_program,
    rope_kv_work,
    rope_kv_write,
)
from mla_router.worker.kernels.pdl import launch_options, reads_early, start_next, wait_for_previous
from mla_router.worker.kernels.weight import Weight


def rope_absorb(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotations: Tensor,
    cache: Tensor,
    out_cache_loc: Tensor,
    w_uk: Weight,
    *,
    interleaved: bool,
    settled: bool = False,
    kv_scale: float = 1.0,
    fp8: StaticFP8 | None = None,
) -> Tensor:
    """Does `rope_kv_write` for q [T, H, D + R], and returns `absorb_queries(q[..., :D], w_uk, fp8)`, [T, H, C], for
    w_uk [H, D, C]. `settled`: rotations and out_cache_loc are (`pdl.py`), and norm_weight is constant. `kv_scale`: see
    `rope_kv_write`.

    The definition is one op after the other.
    """
    rows = (q, kv, norm_weight, eps, rotations, cache, out_cache_loc)
    is_ours = is_small(len(q), *w_uk.values.shape) and is_served(len(q), w_uk, transposed=False)
    if on_gpu(q) and is_ours:
        return rope_absorb_triton(
            *rows, w_uk, interleaved=interleaved, settled=settled, kv_scale=kv_scale, fp8=fp8
        )
    rope_kv_write(*rows, interleaved=interleaved, kv_scale=kv_scale)
    return absorb_queries(q[..., : w_uk.values.shape[1]], w_uk, fp8)


def rope_absorb_triton(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotations: Tensor,
    cache: Tensor,
    out_cache_loc: Tensor,
    w_uk: Weight,
    *,
    interleaved: bool,
    settled: bool = False,
    kv_scale: float = 1.0,
    fp8: StaticFP8 | None = None,
    columns: int | None = None,
    num_warps: int = 4,
) -> Tensor:
    """`columns` of an absorbing program and `num_warps` replace the choices of the separate ops, for benchmarks."""
    tokens, heads, width = q.shape
    _, inputs, outputs = w_uk.values.shape
    # Otherwise programs of one kind would read memory that the other kind writes
    assert width == inputs + 2 * rotations.shape[1] and tokens, (
        f"q {tuple(q.shape)}, w_uk {tuple(w_uk.values.shape)}, rotations {tuple(rotations.shape)}"
    )
    out = q.new_empty(tokens, heads, outputs)
    rope = rope_kv_work(
        q,
        kv,
        norm_weight,
        eps,
        rotations,
        cache,
        out_cache_loc,
        interleaved=interleaved,
        kv_scale=kv_scale,
    )
    absorb = absorb_work(
        q[..., :inputs],
        w_uk,
        out,
        columns or absorb_tiling(heads, tokens)[0],
        transposed=False,
        fp8=fp8,
    )
    row_blocks = absorb.row_blocks(tokens)
    _rope_absorb_kernel[(tokens * rope.programs + heads * absorb.programs * row_blocks,)](
        rope,
        absorb,
        tokens,
        row_blocks,
        ROPES=rope.programs,
        ABSORBS=absorb.programs,
        SETTLED=settled,
        num_warps=num_warps,
        **launch_options(),
    )
    return out


@reads_early(
    {
        "absorb.AHEAD": ("absorb.weight", "absorb.quantized.scales"),
        "SETTLED": ("rope.norm_weight", "rope.rotations", "rope.out_cache_loc"),
    }
)
@triton.jit(do_not_specialize=["tokens", "row_blocks"])
def _rope_absorb_kernel(
    rope,
    absorb,
    tokens,
    row_blocks,
    ROPES: tl.constexpr,
    ABSORBS: tl.constexpr,
    SETTLED: tl.constexpr,
):
    """ROPES programs for each token come first, since they are few and slow, then ABSORBS for each head and block of
    tokens."""
    start_next()
    program = tl.program_id(0)
    absorbing = program - tokens * ROPES
    if absorbing < 0:
        if not SETTLED:
            wait_for_previous()
        rope_kv_program(program // ROPES, program % ROPES, rope)
    else:
        # Neighbouring programs share weights
        row_block, of_head = absorbing % row_blocks, absorbing // row_blocks
        absorb_program(of_head % ABSORBS, of_head // ABSORBS, row_block, absorb, tokens)
