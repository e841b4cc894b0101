"""The part of a program in Hopper's MLA decode kernels with several kinds of warpgroups, each of which goes through its
pieces (`decode_parts.py`). `work` has the arguments of the kernel that say what to do.

    part, request, position, end = own_part(work, ROW_BLOCKS)
    while position < end:
        length, pages, first, last, is_whole = piece_of(work, request, position, end, BLOCK_TOKENS)
        ...
        request += 1
        position = gl.load(work[4] + request)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_router.worker.kernels.attention.decode_parts import part_of, piece_at


@gluon.jit
def own_part(work, ROW_BLOCKS: gl.constexpr):
    """Returns this program's part, and `part_of` it. Neighbouring programs share a part, and its KV rows in L2."""
    _, _, _, _, block_starts, first_requests, part_size, num_requests, _ = work
    part = gl.program_id(0) // ROW_BLOCKS
    request, position, end = part_of(part, part_size, first_requests, block_starts, num_requests)
    return part, request, position, end


@gluon.jit
def piece_of(work, request, position, end, BLOCK_TOKENS: gl.constexpr):
    """Returns `piece_at` a position of the part."""
    page_table, slots, lengths, skipped, block_starts, _, _, _, page_table_stride = work
    return piece_at(
        position,
        end,
        request,
        block_starts,
        lengths,
        slots,
        page_table,
        page_table_stride,
        skipped,
        BLOCK_TOKENS,
    )
