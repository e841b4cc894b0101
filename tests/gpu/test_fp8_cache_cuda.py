"""FP8 KV caches on a GPU: kernels against the definition on the CPU, and decode attention against float64 of the
dequantized rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import StepLayout
from mla_router.worker.engine.attention.triton import MIN_SHARED_ROWS, TritonBackend
from mla_router.worker.kernels.attention.decode_schedule import decode_schedule
from mla_router.worker.kernels.attention.decode_tiling import gqa_tiling, num_parts, tiling
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode
from mla_router.worker.kernels.attention.mla_decode import mla_decode
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.kv_cache.fp8 import FORMATS, KVScales, as_bytes
from mla_router.worker.kernels.kv_cache.gather import kv_gather, kv_gather_torch
from mla_router.worker.kernels.kv_cache.rope_gqa_write import rope_gqa_write
from mla_router.worker.kernels.kv_cache.rope_kv_write import rope_kv_write
from mla_router.worker.model.config.attention_spec import LatentAttentionSpec
from support.cuda import assert_rows_close, captured, forbid_waiting
from support.paged_cache import (
    PagedCache,
    dequantized,
    expected_attention,
    expected_gqa,
    random_cache,
)

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES = list(FORMATS.values())
LATENT, ROPE, SCALE, KV_SCALE = 512, 64, 0.1147, 0.7
LENGTHS = [1, 4000, 17, 64, 65, 1, 128, 700, 2048, 33]


def cache_of(
    lengths: list[int], page_size: int, width: int, dtype: torch.dtype
) -> tuple[PagedCache, torch.Generator]:
    draw = torch.Generator("cuda").manual_seed(len(lengths) + page_size)
    paged = random_cache(lengths, page_size, width, dtype=dtype, generator=draw, device="cuda")
    return paged, draw


def decode(q: Tensor, paged: PagedCache, queries: int = 1, *, settled: bool = False) -> Tensor:
    heads, requests = q.shape[1], len(paged.lengths)
    chosen = tiling(heads, requests, queries, fp8=True, on=limits(CUDA))
    parts = num_parts(chosen, heads, queries, CUDA)
    schedule = decode_schedule(
        paged.lengths, max_length=int(max(LENGTHS)) + 8, tiling=chosen, num_parts=parts
    )
    if settled:
        torch.zeros(1, device="cuda")  # stands for a step's embedding before its layers (`pdl.py`)
    q_latent, q_pe = torch.split(q, [LATENT, ROPE], dim=-1)
    return mla_decode(
        q_latent,
        q_pe,
        paged.cache,
        paged.page_table,
        paged.slots,
        paged.lengths,
        schedule,
        scale=SCALE,
        queries=queries,
        settled=settled,
        kv_scale=KV_SCALE,
    )


def expected_of(q: Tensor, paged: PagedCache, queries: int = 1) -> Tensor:
    return expected_attention(q, dequantized(paged, KV_SCALE), LATENT, SCALE, queries)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (128, 1), (16, 2), (16, 4), (8, 3)])
def test_mla_decode(heads: int, queries: int, page_size: int, dtype: torch.dtype) -> None:
    """Rows without an owner are NaN."""
    lengths = [length + queries - 1 for length in LENGTHS]
    paged, draw = cache_of(lengths, page_size, LATENT + ROPE, dtype)
    shape = len(lengths) * queries, heads, LATENT + ROPE
    q = torch.randn(shape, generator=draw, device="cuda").bfloat16()
    assert_rows_close(decode(q, paged, queries), expected_of(q, paged, queries))


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("requests", [1, 24, 64, 128, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_decode_batches(dtype: torch.dtype, requests: int, out: torch.dtype) -> None:
    """Requests with one part, with several, and parts of several requests."""
    lengths = [1 + 37 * i % 600 for i in range(requests)]
    paged, draw = cache_of(lengths, 16, LATENT + ROPE, dtype)
    q = torch.randn(requests, 16, LATENT + ROPE, generator=draw, device="cuda").to(out)
    assert_rows_close(decode(q, paged, settled=True), expected_of(q, paged))


def test_mla_decode_in_a_cuda_graph() -> None:
    paged, draw = cache_of(LENGTHS, 64, LATENT + ROPE, DTYPES[0])
    q = torch.randn(len(LENGTHS), 16, LATENT + ROPE, generator=draw, device="cuda").bfloat16()
    replay, out = captured(lambda: decode(q, paged))
    replay()
    assert_rows_close(out, expected_of(q, paged))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_common_prefixes(dtype: torch.dtype, page_size: int) -> None:
    lengths = [2048 + 150 * i % 700 for i in range(MIN_SHARED_ROWS + 11)]
    paged, draw = cache_of(lengths, page_size, LATENT + ROPE, dtype)
    paged.share(range(len(lengths)), 2048 // page_size)
    q = torch.randn(len(lengths), 16, LATENT + ROPE, generator=draw, device="cuda").bfloat16()
    spec = LatentAttentionSpec(
        num_heads=16,
        scale=SCALE,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=128,
        qk_rope_head_dim=ROPE,
        v_head_dim=128,
    )
    layout = StepLayout(paged.page_table, page_size, paged.slots, paged.lengths, max(lengths))
    attention = TritonBackend(spec, CUDA, torch.bfloat16, dtype).plan(layout)
    assert attention.prefixes is not None and attention.prefixes.lengths.count_nonzero()
    torch.zeros(1, device="cuda")
    q_latent, q_pe = torch.split(q, [LATENT, ROPE], dim=-1)
    got = attention.mla_decode(q_latent, q_pe, paged.cache, scales=KVScales(KV_SCALE))
    assert_rows_close(got, expected_of(q, paged))


# Heads, KV heads, head_dim of keys and of values: Llama 3 8B and 3.2 1B, multi-query, V2-Lite without absorption, and
# sizes that are no powers of two
SHAPES = [
    (32, 8, 128, 128),
    (32, 8, 64, 64),
    (64, 1, 64, 64),
    (16, 16, 192, 128),
    (26, 26, 100, 100),
]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gqa_decode(dtype: torch.dtype, shape: tuple[int, int, int, int], page_size: int) -> None:
    heads, kv_heads, head_dim, v_head_dim = shape
    row = kv_heads * (head_dim + v_head_dim)
    paged, draw = cache_of(LENGTHS, page_size, row, dtype)
    q = torch.randn(len(LENGTHS), heads, head_dim, generator=draw, device="cuda").bfloat16()
    chosen = gqa_tiling(
        heads // kv_heads, head_dim + v_head_dim, head_dim=head_dim, fp8=True, on=limits(CUDA)
    )
    parts = num_parts(chosen, heads, 1, CUDA, num_kv_heads=kv_heads)
    schedule = decode_schedule(paged.lengths, max_length=4000, tiling=chosen, num_parts=parts)
    out, scales = q.new_empty(len(LENGTHS), heads, v_head_dim), KVScales(0.7, 1.9)
    place = paged.cache, paged.page_table, paged.slots, paged.lengths, schedule, out
    gqa_decode(q, *place, scale=0.0884, scales=scales)
    read = dequantized(paged, *scales, kv_heads * head_dim)
    assert_rows_close(out, expected_gqa(q, read, kv_heads, v_head_dim, 0.0884))


def assert_stored(got: Tensor, expected: Tensor) -> None:
    """Sums in another order may round a number to its neighbour."""
    same = as_bytes(got.cpu()) == as_bytes(expected)
    assert same.float().mean() > 0.99
    torch.testing.assert_close(got.cpu().float(), expected.float(), rtol=0.3, atol=2**-9)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_kv_write(dtype: torch.dtype, interleaved: bool, in_place: bool) -> None:
    """Some numbers are beyond the range of the format."""
    torch.manual_seed(1)
    q, kv = torch.randn(257, 16, 192).bfloat16(), torch.randn(257, 576).bfloat16()
    kv[:, 520] *= 1e6
    weight = (100 * torch.rand(512)).bfloat16()
    angles = 6 * torch.rand(257, 32)
    rest = torch.polar(torch.ones_like(angles), angles), 64 + torch.randperm(512)[:257]
    write = partial(rope_kv_write, interleaved=interleaved, in_place=in_place, kv_scale=0.3)
    stored = []
    for device in ("cpu", "cuda"):
        own_q, own, own_weight, rotations, at = (
            x.to(device).clone() for x in (q, kv, weight, *rest)
        )
        cache = torch.zeros(9, 64, 576, device=device).to(dtype)
        write(own_q, own, own_weight, 1e-6, rotations, cache, at)
        stored.append(as_bytes(cache).flatten(0, 1)[at].view(dtype))
        wanted = (stored[-1].float() * 0.3).bfloat16() if in_place else kv.to(device)
        assert torch.equal(own, wanted)
    assert stored[0].float().abs().max() == torch.finfo(dtype).max
    assert_stored(stored[1], stored[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_gqa_write(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    q, k, v = (100 * torch.randn(257, n, 128).bfloat16() for n in (32, 8, 8))
    angles = 6 * torch.rand(257, 64)
    rest = torch.polar(torch.ones_like(angles), angles), 64 + torch.randperm(512)[:257]
    stored = []
    for device in ("cpu", "cuda"):
        own_q, own_k, own_v, rotations, at = (x.to(device).clone() for x in (q, k, v, *rest))
        cache = torch.zeros(9, 64, 2048, device=device).to(dtype)
        operands = own_q, own_k[..., :0], own_k, own_v, rotations, cache, at
        rope_gqa_write(*operands, interleaved=False, scales=KVScales(0.3, 1.7))
        stored.append(as_bytes(cache).flatten(0, 1)[at].view(dtype))
    assert_stored(stored[1], stored[0])


@pytest.mark.parametrize(("width", "column"), [(576, 0), (2048, 1024)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_gather(dtype: torch.dtype, width: int, column: int) -> None:
    cache = (20 * torch.randn(301, 64, width, device="cuda")).to(dtype)
    table = (torch.randperm(300, device="cuda").int() + 1).view(3, 100)
    slots = torch.tensor([2, 0], device="cuda")
    first = torch.tensor([0, 70], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 5000, 5123], dtype=torch.int32, device="cuda")
    scales = KVScales(0.37, 3.0) if column else KVScales(0.37, 0.37)
    ways = [
        partial(
            gather,
            cache,
            table,
            slots,
            first,
            starts,
            5123,
            dtype=torch.bfloat16,
            scales=scales,
            value_column=column,
        )
        for gather in (kv_gather, kv_gather_torch)
    ]
    with forbid_waiting():
        got = ways[0]()
    assert got.dtype == torch.bfloat16 and torch.equal(got, ways[1]())
