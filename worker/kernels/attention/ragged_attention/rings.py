"""Rings of tiles in shared memory: one warp fills them by the tensor memory accelerator, and other warps read them.

Each tile has two barriers (`mbarrier`, PTX ISA, "Asynchronous Barriers"): `full` is passed when its bytes have arrived,
`empty` when all readers have released it. At its n-th use of a tile a warp waits for the n-th passage, which differs
from the passage before by its parity alone.

There is no `from __future__ import annotations` here: an aggregate's fields are evaluated when it is declared.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate


@aggregate
class Ring:
    tiles: gl.shared_memory_descriptor  # [COUNT, rows, width]
    # The second part of the same rows; `tiles` if there is none
    others: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # [COUNT, 1]
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, others, full, empty):
        self.tiles = tiles
        self.others = others
        self.full = full
        self.empty = empty


@gluon.jit
def _room(source, COUNT: gl.constexpr):
    shape: gl.constexpr = source.block_type.shape
    return gl.allocate_shared_memory(source.dtype, [COUNT, shape[0], shape[1]], source.layout)


@gluon.jit
def new_ring(source, other_source, COUNT: gl.constexpr, READERS: gl.constexpr):
    """Returns a ring of COUNT tiles of `source`, and of `other_source` if it is not the same."""
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = _room(source, COUNT)
    others = tiles
    if other_source is not None:
        others = _room(other_source, COUNT)
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], barriers)
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(tiles, others, full, empty)


@gluon.jit
def fill(ring, step, source, column, other_source, other_column, row):
    """Fills the tile of a step with rows from `row` on, once all readers have released it."""
    COUNT: gl.constexpr = ring.full.shape[0]
    stage = step % COUNT
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), ((step // COUNT) & 1) ^ 1)
    if other_source is None:
        mbarrier.expect(full, source.block_type.nbytes)
    else:
        mbarrier.expect(full, source.block_type.nbytes + other_source.block_type.nbytes)
        tma.async_copy_global_to_shared(
            other_source, [row, other_column], full, ring.others.index(stage)
        )
    tma.async_copy_global_to_shared(source, [row, column], full, ring.tiles.index(stage))


@gluon.jit
def wait_full(ring, step):
    COUNT: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(step % COUNT), (step // COUNT) & 1)


@gluon.jit
def let_go(ring, step):
    COUNT: gl.constexpr = ring.full.shape[0]
    mbarrier.arrive(ring.empty.index(step % COUNT))
