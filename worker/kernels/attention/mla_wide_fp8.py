"""The warpgroup of `mla_decode_wide.py` that copies queries and cached rows, if the cache is FP8.

Both products read cached rows from shared memory, in both orientations, so they want words of 16 bits (`fp8_numbers.py`).
This warpgroup loads FP8 rows into registers, converts them to float16, and stores them where the other copies put 16-bit
rows. Registers are few, so a piece is 64 columns of a tile. `AHEAD` pieces are being loaded while one is converted, and
loads need not wait for the memory that the piece will go to.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_router.worker.kernels.attention.fp8_numbers import operand
from mla_router.worker.kernels.attention.mla_wide_rows import (
    ROWS,
    TOKENS,
    own_rows,
    pages_of_pair,
    pair_at,
    queries_at,
)
from mla_router.worker.kernels.attention.mla_work import own_part, piece_of
from mla_router.worker.kernels.pdl import wait_for_previous

PIECE = gl.constexpr(64)  # columns
AHEAD = gl.constexpr(3)  # pieces; 4 take more registers than there are


@gluon.jit
def convert_pieces(
    rows,
    queries,
    work,
    of_queries,
    cache,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SETTLED: gl.constexpr,
    FP8: gl.constexpr,
):
    """Copies the queries of each piece of work and then its tiles, each part as soon as its memory is released."""
    latents, ropes = rows[0], rows[1]
    query_barriers = queries[2]
    block_starts = work[4]
    ROW_BLOCKS: gl.constexpr = (HEADS * QUERIES + ROWS - 1) // ROWS
    HALF: gl.constexpr = latents.shape[2]
    ROPE: gl.constexpr = ropes.shape[2]
    WIDTH: gl.constexpr = (2 * HALF + ROPE) // 4  # words of four numbers
    PIECES: gl.constexpr = 8 * WIDTH // PIECE  # of a pair of tiles
    loaded: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    query_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    words = cache.to(gl.pointer_type(gl.int32))
    tokens = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, loaded))
    query, head, exists = own_rows(query_layout, HEADS, QUERIES)
    if not SETTLED:
        wait_for_previous()
    _part, request, position, end = own_part(work, ROW_BLOCKS)
    step, fills = 0, 0
    while position < end:
        length, table, first, last, _ = piece_of(work, request, position, end, 2 * TOKENS)
        length = gl.minimum(length, last * (2 * TOKENS))
        pages = pages_of_pair(table, 2 * first, tokens, length, PAGE_SIZE)
        if SETTLED:
            wait_for_previous()
        if first < last:
            tiles = pair_at(words, pages, 2 * first, tokens, length, PAGE_SIZE, WIDTH)
            coming = gl.tuple(())
            for piece in gl.static_range(AHEAD):
                coming += (_load(tiles, piece, HALF),)
            mbarrier.wait(query_barriers.index(1), (fills & 1) ^ 1)
            _copy_queries(queries, of_queries, request, query, head, exists, QUERIES, FP8)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(query_barriers.index(0))
            fills += 1
            pages = pages_of_pair(table, 2 * first + 2, tokens, length, PAGE_SIZE)
            for block in range(first, last):
                for piece in gl.static_range(PIECES):
                    if piece + AHEAD == PIECES:
                        tiles = pair_at(
                            words, pages, 2 * block + 2, tokens, length, PAGE_SIZE, WIDTH
                        )
                        pages = pages_of_pair(table, 2 * block + 4, tokens, length, PAGE_SIZE)
                    later = _load(tiles, (piece + AHEAD) % PIECES, HALF)
                    _put(rows, step, piece, coming[0], FP8)
                    coming = coming[1:]
                    coming += (later,)
                step += 1
        request += 1
        position = gl.load(block_starts + request)
    if SETTLED:
        wait_for_previous()  # for a part without pieces


@gluon.constexpr_function
def place_of(piece: int, pieces: int) -> tuple[int, int]:
    """Returns the half of a tile that a piece belongs to, and its column there; the rotary part is after the half that
    is released last. Halves come in the order in which they are released."""
    few = (pieces - 2) // 4
    if piece < 2 * few:
        return (0, 3)[piece // few], piece % few
    piece -= 2 * few
    return (1, 2)[piece // (few + 1)], piece % (few + 1)


@gluon.jit
def _load(tiles, piece: gl.constexpr, HALF: gl.constexpr):
    """Returns a piece of a pair of tiles, and zeros where nothing exists: rows beyond the end may be NaN."""
    FEW: gl.constexpr = HALF // PIECE
    place: gl.constexpr = place_of(piece, 4 * FEW + 2)
    columns: gl.constexpr = 2 * HALF if place[1] == FEW else place[0] % 2 * HALF + place[1] * PIECE
    rows, exists = tiles[place[0] // 2]
    layout: gl.constexpr = rows.type.layout
    column = gl.expand_dims(gl.arange(0, PIECE // 4, layout=gl.SliceLayout(0, layout)), 0)
    return gl.load(rows + (columns // 4 + column), mask=exists, other=0)


@gluon.jit
def _put(rows, step, piece: gl.constexpr, numbers, FP8: gl.constexpr):
    """Converts and stores a piece. The first one of a half waits for its memory, the last one hands it over."""
    latents, ropes, full, empty = rows
    FEW: gl.constexpr = latents.shape[2] // PIECE
    PLACE: gl.constexpr = place_of(piece, 4 * FEW + 2)
    half: gl.constexpr = PLACE[0]
    column: gl.constexpr = PLACE[1]
    LAST: gl.constexpr = FEW if half == 1 or half == 2 else FEW - 1
    if column == 0:
        mbarrier.wait(empty.index(half), (step & 1) ^ 1)
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    if column == FEW:
        room = ropes.index(half // 2)._reinterpret(gl.int32, [TOKENS, PIECE // 2], pairs)
    else:
        room = latents.index(half)._reinterpret(gl.int32, [TOKENS, FEW * PIECE // 2], pairs)
        room = room.slice(column * (PIECE // 2), PIECE // 2, dim=1)
    room.store(_converted(numbers, FP8))
    if column == LAST:
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(half))


@gluon.jit
def _converted(words, FP8: gl.constexpr):
    """Returns words of four FP8 numbers as pairs of float16 [rows, 2 * words]."""
    KIND: gl.constexpr = "e4m3x2" if FP8 == 4 else "e5m2x2"
    low, high = gl.inline_asm_elementwise(
        "{.reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2."
        + KIND
        + " $0, low; cvt.rn.f16x2."
        + KIND
        + " $1, high;}",
        "=&r,=&r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(low, high).reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def _copy_queries(
    queries, of_queries, request, query, head, exists, QUERIES: gl.constexpr, FP8: gl.constexpr
):
    """Copies a request's queries of this program's rows."""
    latent_queries, rope_queries, _ = queries
    q_latent, q_pe, q_latent_stride_t, q_latent_stride_h, q_pe_stride_t, q_pe_stride_h = of_queries
    HALF: gl.constexpr = latent_queries.shape[2]
    at = queries_at(q_latent, q_latent_stride_t, q_latent_stride_h, request, query, head, QUERIES)
    for part in gl.static_range(2):
        for piece in gl.static_range(HALF // PIECE):
            _store_queries(
                latent_queries.index(part).slice(piece * PIECE, PIECE, dim=1),
                at + (part * HALF + piece * PIECE),
                exists,
                FP8,
            )
    at = queries_at(q_pe, q_pe_stride_t, q_pe_stride_h, request, query, head, QUERIES)
    _store_queries(rope_queries.index(0), at, exists, FP8)


@gluon.jit
def _store_queries(room, rows, exists, FP8: gl.constexpr):
    """Copies 64 columns of the queries at the pointers `rows` [64, 1], and zeros where none exist."""
    columns: gl.constexpr = gl.SliceLayout(0, rows.type.layout)
    column = gl.expand_dims(gl.arange(0, PIECE, layout=columns), 0)
    room.store(operand(gl.load(rows + column, mask=exists, other=0.0), FP8))
