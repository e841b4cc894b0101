"""gqa_decode in bfloat16 on a GPU, at the shapes of real models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule, decode_schedule
from mla_router.worker.kernels.attention.decode_tiling import gqa_tiling, num_parts
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode, gqa_decode_triton
from mla_router.worker.kernels.attention.tree_tail import one_part_each
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.kv_cache.fp8 import UNSCALED, KVScales
from support.captured_decode import check_captured
from support.cuda import assert_rows_close, forbid_waiting
from support.paged_cache import PagedCache, expected_gqa, random_cache
from support.tree_tails import cached_trees

pytestmark = pytest.mark.gpu

SCALE = 0.0884
LENGTHS = [1, 4000, 17, 64, 65, 1, 128, 700, 2048, 33]

# Heads, KV heads, head_dim of keys and values: Llama 3 8B, 3.2 1B and 3B, Llama 2, multi-query, V2-Lite without
# absorption, and sizes that are no powers of two
SHAPES = [
    (32, 8, 128, 128),
    (32, 8, 64, 64),
    (24, 8, 128, 128),
    (32, 32, 128, 128),
    (64, 1, 64, 64),
    (16, 16, 192, 128),
    (32, 32, 80, 80),
    (26, 26, 100, 100),
]


class Inputs:
    def __init__(
        self,
        lengths: list[int],
        shape: tuple[int, int, int, int],
        page_size: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Rows of the cache without an owner are NaN, queries are views of a joined projection."""
        self.heads, self.kv_heads, head_dim, self.v_head_dim = shape
        draw = torch.Generator("cuda").manual_seed(len(lengths) + self.heads)
        row = self.kv_heads * (head_dim + self.v_head_dim)
        self.paged = random_cache(
            lengths, page_size, row, dtype=dtype, generator=draw, device="cuda"
        )
        joined = len(lengths), self.heads + 2 * self.kv_heads, head_dim
        self.q = torch.randn(joined, generator=draw, device="cuda").to(dtype)[:, : self.heads]
        self.max_length = max(lengths)

    def schedule(self) -> DecodeSchedule:
        lengths = self.paged.lengths
        kv_dim = self.q.shape[-1] + self.v_head_dim
        share, on = self.heads // self.kv_heads, limits(torch.device("cuda"))
        chosen = gqa_tiling(share, kv_dim, num_kv_heads=self.kv_heads, on=on)
        parts = num_parts(chosen, self.heads, 1, lengths.device, num_kv_heads=self.kv_heads)
        return decode_schedule(lengths, max_length=self.max_length, tiling=chosen, num_parts=parts)

    def run(self, *, settled: bool = False) -> Tensor:
        """Runs the schedule, then a layer."""
        paged, schedule = self.paged, self.schedule()
        if (
            settled
        ):  # a kernel of torch's stands for a step's embedding before its layers (`pdl.py`)
            torch.zeros(1, device="cuda")
        out = self.q.new_empty(len(self.q), self.heads, self.v_head_dim)
        gqa_decode(
            self.q,
            paged.cache,
            paged.page_table,
            paged.slots,
            paged.lengths,
            schedule,
            out,
            scale=SCALE,
            settled=settled,
        )
        return out

    def expected(self, of: PagedCache | None = None) -> Tensor:
        of = of or self.paged
        return expected_gqa(self.q[: len(of.rows)], of, self.kv_heads, self.v_head_dim, SCALE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float64(shape: tuple[int, int, int, int], page_size: int, dtype: torch.dtype) -> None:
    inputs = Inputs(LENGTHS, shape, page_size, dtype)
    assert_rows_close(inputs.run(), inputs.expected())


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("requests", [1, 300])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_batch_sizes(shape: tuple[int, int, int, int], requests: int, settled: bool) -> None:
    inputs = Inputs([1 + 37 * i % 600 for i in range(requests)], shape, 64)
    assert_rows_close(inputs.run(settled=settled), inputs.expected())


def test_float32_takes_the_torch_way() -> None:
    inputs = Inputs(LENGTHS, SHAPES[0], 16, torch.float32)
    with forbid_waiting():
        got = inputs.run()
    torch.testing.assert_close(got.double(), inputs.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5]], ids=str)
def test_graph_follows_the_lengths(shape: tuple[int, int, int, int]) -> None:
    inputs = Inputs(LENGTHS, shape, 64)
    check_captured(inputs.paged, inputs.run, inputs.expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("shape", "queries", "keys"),
    [
        ((32, 8, 128, 128), 8, 8),
        ((32, 8, 128, 128), 4, 16),
        ((64, 8, 128, 128), 16, 64),
        ((32, 32, 80, 80), 8, 8),
    ],
    ids=str,
)
def test_trees(
    shape: tuple[int, int, int, int], queries: int, keys: int, dtype: torch.dtype
) -> None:
    """Each node attends to the tokens in front of its tree, and to its ancestors. Rows without an owner are NaN."""
    heads, kv_heads, head_dim, v_head_dim = shape
    row, count, cuda = kv_heads * (head_dim + v_head_dim), len(LENGTHS), torch.device("cuda")
    fp8 = dtype != torch.bfloat16
    trees = cached_trees(LENGTHS, queries, keys, row, page_size=16, dtype=dtype, device="cuda")
    scales = KVScales(0.5, 1.5) if fp8 else UNSCALED
    chosen = gqa_tiling(
        heads // kv_heads * queries,
        head_dim + v_head_dim,
        head_dim=head_dim,
        fp8=fp8,
        on=limits(cuda),
    )
    parts = num_parts(chosen, heads, queries, cuda, num_kv_heads=kv_heads)
    schedule = decode_schedule(
        trees.lengths, max_length=max(LENGTHS), tiling=chosen, num_parts=parts
    )
    q = torch.randn(count * queries, heads, head_dim, device="cuda").bfloat16()
    out = torch.empty(count * queries, heads, v_head_dim, device="cuda").bfloat16()
    gqa_decode_triton(
        q,
        trees.cache,
        trees.page_table,
        torch.arange(count, device="cuda"),
        trees.lengths,
        schedule,
        out,
        scale=SCALE,
        scales=scales,
        tail=trees.tail._replace(schedule=one_part_each(count, chosen, cuda)),
    )
    expected = torch.empty(out.shape, dtype=torch.float64, device="cuda")
    for at in range(count * queries):
        k, v = trees.seen(at).double().tensor_split([kv_heads * head_dim], dim=1)
        k = k.view(-1, kv_heads, head_dim).repeat_interleave(heads // kv_heads, dim=1)
        v = v.view(-1, kv_heads, v_head_dim).repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("nhw,hw->hn", k * scales.keys, q[at].double()) * SCALE
        expected[at] = torch.einsum("hn,nhv->hv", scores.softmax(dim=-1), v * scales.values)
    assert_rows_close(out, expected)
