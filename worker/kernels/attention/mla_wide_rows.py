"""The warpgroup of `mla_decode_wide.py` that copies queries and cached rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_router.worker.kernels.attention.mla_decode_hopper import pages_of_rows
from mla_router.worker.kernels.attention.mla_work import own_part, piece_of
from mla_router.worker.kernels.pdl import wait_for_previous

TOKENS = gl.constexpr(64)  # of a tile: columns of the first product
ROWS = gl.constexpr(64)  # query rows of both products
COPIERS = gl.constexpr(128)  # threads that copy


@gluon.jit
def own_rows(columns: gl.constexpr, HEADS: gl.constexpr, QUERIES: gl.constexpr):
    """Returns query and head of each of this program's rows [64, 1], and which rows exist. `columns`: the layout of
    copies."""
    ALL_ROWS: gl.constexpr = HEADS * QUERIES
    ROW_BLOCKS: gl.constexpr = (ALL_ROWS + ROWS - 1) // ROWS
    row = gl.program_id(0) % ROW_BLOCKS * ROWS
    row += gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, columns)), 1)
    return row // HEADS, row % HEADS, row < ALL_ROWS


@gluon.jit
def queries_at(queries, stride_t, stride_h, request, query, head, QUERIES: gl.constexpr):
    """Returns pointers [64, 1] to the latent or to the rotary parts of this program's rows."""
    new_token = (request * QUERIES).to(gl.int64)
    at = queries + new_token * stride_t
    return at + (query * stride_t + head * stride_h)


@gluon.jit
def copy_pieces(
    rows,
    queries,
    work,
    of_queries,
    cache,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SETTLED: gl.constexpr,
):
    """Copies the queries of each piece and then its tiles, each part as soon as its memory is released."""
    latents, ropes = rows[0], rows[1]
    latent_queries, rope_queries, query_barriers = queries
    q_latent, q_pe, q_latent_stride_t, q_latent_stride_h, q_pe_stride_t, q_pe_stride_h = of_queries
    block_starts = work[4]
    ROW_BLOCKS: gl.constexpr = (HEADS * QUERIES + ROWS - 1) // ROWS
    HALF: gl.constexpr = latents.shape[2]
    ROPE: gl.constexpr = ropes.shape[2]
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tokens = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, copied))
    query, head, exists = own_rows(copied, HEADS, QUERIES)
    if not SETTLED:
        wait_for_previous()
    _part, request, position, end = own_part(work, ROW_BLOCKS)
    step, pieces = 0, 0
    while position < end:
        length, table, first, last, _ = piece_of(work, request, position, end, 2 * TOKENS)
        pages = pages_of_pair(table, 2 * first, tokens, length, PAGE_SIZE)
        if SETTLED:
            wait_for_previous()
        if first < last:
            mbarrier.wait(query_barriers.index(1), (pieces & 1) ^ 1)
            at = queries_at(
                q_latent, q_latent_stride_t, q_latent_stride_h, request, query, head, QUERIES
            )
            for part_of_row in gl.static_range(2):
                _put(latent_queries.index(part_of_row), at + part_of_row * HALF, exists)
            at = queries_at(q_pe, q_pe_stride_t, q_pe_stride_h, request, query, head, QUERIES)
            _put(rope_queries.index(0), at, exists)
            async_copy.mbarrier_arrive(query_barriers.index(0), increment_count=False)
            pieces += 1
        for block in range(first, last):
            tiles = pair_at(cache, pages, 2 * block, tokens, length, PAGE_SIZE, 2 * HALF + ROPE)
            pages = pages_of_pair(table, 2 * block + 2, tokens, length, PAGE_SIZE)
            # In the order in which they are released
            _fill(rows, step, 0, tiles)
            _fill(rows, step, 3, tiles)
            _fill(rows, step, 1, tiles)
            _fill(rows, step, 2, tiles)
            step += 1
        request += 1
        position = gl.load(block_starts + request)
    if SETTLED:
        wait_for_previous()  # for a part without pieces


@gluon.jit
def pages_of_pair(table, tile, tokens, length, PAGE_SIZE: gl.constexpr):
    """Returns the pages [64] of the tokens of a tile, and of the next one."""
    return (
        pages_of_rows(table, tile, tokens, length, PAGE_SIZE),
        pages_of_rows(table, tile + 1, tokens, length, PAGE_SIZE),
    )


@gluon.jit
def pair_at(cache, pages, tile, tokens, length, PAGE_SIZE: gl.constexpr, WIDTH: gl.constexpr):
    """Returns, for a tile and for the next one, pointers [64, 1] to its rows, and which of them exist."""
    return (
        _rows_at(cache, pages[0], tile, tokens, length, PAGE_SIZE, WIDTH),
        _rows_at(cache, pages[1], tile + 1, tokens, length, PAGE_SIZE, WIDTH),
    )


@gluon.jit
def _rows_at(cache, page, tile, tokens, length, PAGE_SIZE: gl.constexpr, WIDTH: gl.constexpr):
    """Rows beyond the end belong to another request or to none, and may be NaN."""
    at = tile * TOKENS + tokens
    row = page.to(gl.int64) * PAGE_SIZE + at % PAGE_SIZE
    return cache + gl.expand_dims(row * WIDTH, 1), gl.expand_dims(at < length, 1)


@gluon.jit
def _fill(rows, step, place: gl.constexpr, tiles):
    """Copies half of the latents of a tile, once its memory is released. The rotary part comes with the half that is
    released last."""
    row, exists = tiles[place // 2]
    latents, ropes, full, empty = rows
    HALF: gl.constexpr = latents.shape[2]
    LAST: gl.constexpr = place == 1 or place == 2
    half = row + place % 2 * HALF
    rope = row + 2 * HALF
    mbarrier.wait(empty.index(place), (step & 1) ^ 1)
    _put(latents.index(place), half, exists)
    if LAST:
        _put(ropes.index(place // 2), rope, exists)
    async_copy.mbarrier_arrive(full.index(place), increment_count=False)


@gluon.jit
def _put(room, rows, exists):
    """Copies the rows at the pointers `rows` [64, 1], and zeros where none exist."""
    columns: gl.constexpr = gl.SliceLayout(0, rows.type.layout)
    column = gl.expand_dims(gl.arange(0, room.shape[1], layout=columns), 0)
    async_copy.async_copy_global_to_shared(room, rows + column, mask=exists)
