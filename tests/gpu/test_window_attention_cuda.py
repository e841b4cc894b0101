"""Grouped-query attention with sliding windows and capped scores in bfloat16 on a GPU, at Gemma 2's shapes: decode and
prefill across the border of the window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import decode_schedule
from mla_router.worker.kernels.attention.decode_tiling import gqa_tiling, num_parts
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode
from mla_router.worker.kernels.attention.prefill_work import TALL_BLOCK, PrefillWork
from mla_router.worker.kernels.attention.ragged_attention import ragged_attention
from mla_router.worker.kernels.attention.ragged_attention.tiling import block_queries
from mla_router.worker.kernels.attention.ragged_attention.torch import ragged_attention_torch
from mla_router.worker.kernels.device import limits
from support.captured_decode import check_captured
from support.cuda import assert_rows_close
from support.paged_cache import PagedCache, expected_gqa, forget_rows_before, random_cache

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SCALE = 0.0625
# Heads, KV heads, head_dim: Gemma 2 9B, 2B and 27B, and heads 64 wide
SHAPES = [(16, 8, 256), (8, 4, 256), (32, 16, 128), (14, 2, 64)]
OPTIONS = [(4096, 50.0), (4096, None), (None, 50.0), (100, 2.0)]
LENGTHS = [1, 4095, 4096, 4097, 8000, 100, 101, 4128, 33]


class Decode:
    def __init__(
        self, shape: tuple[int, int, int], window: int | None, softcap: float | None, page_size: int
    ) -> None:
        """Rows of the cache without an owner and before the window are NaN."""
        self.heads, self.kv_heads, self.width = shape
        self.window, self.softcap = window, softcap
        draw = torch.Generator("cuda").manual_seed(0)
        row = 2 * self.kv_heads * self.width
        self.paged = random_cache(
            LENGTHS, page_size, row, dtype=torch.bfloat16, generator=draw, device="cuda"
        )
        joined = len(LENGTHS), self.heads + 2 * self.kv_heads, self.width
        self.q = torch.randn(joined, generator=draw, device="cuda").bfloat16()[:, : self.heads]

    def run(self) -> Tensor:
        paged = self.paged
        share = self.heads // self.kv_heads
        chosen = gqa_tiling(share, 2 * self.width, num_kv_heads=self.kv_heads, on=limits(DEVICE))
        parts = num_parts(chosen, self.heads, 1, DEVICE, num_kv_heads=self.kv_heads)
        schedule = decode_schedule(
            paged.lengths, max_length=8192, tiling=chosen, num_parts=parts, window=self.window
        )
        out = self.q.new_empty(self.q.shape)
        tables = paged.page_table, paged.slots, paged.lengths
        gqa_decode(self.q, paged.cache, *tables, schedule, out, scale=SCALE, softcap=self.softcap)
        return out

    def expected(self, of: PagedCache | None = None) -> Tensor:
        of = of or self.paged
        return expected_gqa(
            self.q[: len(of.rows)],
            of,
            self.kv_heads,
            self.width,
            SCALE,
            window=self.window,
            softcap=self.softcap,
        )


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("window", "softcap"), OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode(
    shape: tuple[int, int, int], window: int | None, softcap: float | None, page_size: int
) -> None:
    inputs = Decode(shape, window, softcap, page_size)
    if window is not None:
        forget_rows_before(inputs.paged, window)
    assert_rows_close(inputs.run(), inputs.expected())


def test_decode_in_a_graph_follows_the_lengths() -> None:
    inputs = Decode(SHAPES[0], 4096, 50.0, 64)
    check_captured(inputs.paged, inputs.run, inputs.expected)


# Query rows and key rows of each chunk: tall blocks, short blocks, one query
CHUNKS = [[(4096, 8191), (5, 4100), (300, 300)], [(40, 4135), (1, 4096), (1, 1)]]


@pytest.mark.parametrize("extents", CHUNKS, ids=["tall", "short"])
@pytest.mark.parametrize(("window", "softcap"), OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill(
    shape: tuple[int, int, int],
    window: int | None,
    softcap: float | None,
    extents: list[tuple[int, int]],
) -> None:
    check_prefill(shape, extents, (), window=window, softcap=softcap)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_over_a_part_of_the_prefix(shape: tuple[int, int, int]) -> None:
    """The last queries of the first chunk see no key of it, and those of the second chunk all."""
    extents = [(512, 1000), (64, 700), (1, 64)]
    check_prefill(shape, extents, (3700, 0, 100), window=4096, softcap=50.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_of_scores_near_the_cap(shape: tuple[int, int, int]) -> None:
    """The hardware's tanh errs most there, by 0.02 of a score near 50."""
    scale = 40 * shape[2] ** -0.5
    extents = [(1024, 1024), (300, 2000)]
    check_prefill(shape, extents, (), window=None, softcap=50.0, scale=scale, most=3e-2)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nan_of_one_chunk_does_not_reach_another(
    shape: tuple[int, int, int], window: int | None
) -> None:
    heads, kv_heads, width = shape
    extents = [(200, 300), (130, 500), (300, 333)]
    work = PrefillWork.on(DEVICE, extents, heads=heads, block_queries=TALL_BLOCK, window=window)
    q = torch.randn(630, heads, width, device="cuda").bfloat16()
    k, v = torch.randn(2, 1133, kv_heads, width, device="cuda").bfloat16()
    before, _ = ragged_attention(q, k, v, None, work, scale=SCALE, softcap=50.0)
    k[300:800] = v[300:800] = float("nan")
    after, _ = ragged_attention(q, k, v, None, work, scale=SCALE, softcap=50.0)
    assert after[200:330].isnan().all()
    assert torch.equal(after[:200], before[:200]) and torch.equal(after[330:], before[330:])


def check_prefill(
    shape: tuple[int, int, int],
    extents: list[tuple[int, int]],
    gaps: tuple[int, ...],
    *,
    window: int | None,
    softcap: float | None,
    scale: float = SCALE,
    most: float = 1e-2,
) -> None:
    heads, kv_heads, width = shape
    draw = torch.Generator("cuda").manual_seed(0)
    queries, keys = (sum(column) for column in zip(*extents, strict=True))

    def drawn(rows: int, of: int) -> Tensor:
        return torch.randn(rows, of, width, generator=draw, device="cuda").bfloat16()

    q, k, v = drawn(queries, heads), drawn(keys, kv_heads), drawn(keys, kv_heads)
    causal = not gaps
    work = PrefillWork.on(
        DEVICE,
        extents,
        heads=heads,
        causal=causal,
        block_queries=block_queries(width, width, limits(DEVICE)),
        window=window,
        gaps=gaps,
    )
    got, lse = ragged_attention(q, k, v, None, work, scale=scale, softcap=softcap)
    expected, expected_lse = ragged_attention_torch(
        q.double(),
        k.double(),
        v.double(),
        None,
        extents,
        scale=scale,
        causal=causal,
        window=window,
        gaps=gaps,
        softcap=softcap,
    )
    has_keys = expected_lse > float("-inf")
    assert_rows_close(got[has_keys], expected[has_keys], most)
    assert not got[~has_keys].any()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-3)
