"""Launches on an A100, an L40S and a B200, compiled for these GPUs; and the measured tiles of an H200."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from mla_router.worker.kernels import device
from mla_router.worker.kernels.attention.absorb import expand_values_triton
from mla_router.worker.kernels.attention.decode_schedule import (
    decode_schedule_torch,
    decode_schedule_triton,
)
from mla_router.worker.kernels.attention.decode_tiling import Tiling, gqa_tiling, num_parts, tiling
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode_triton
from mla_router.worker.kernels.attention.mla_decode import mla_decode_triton
from mla_router.worker.kernels.attention.prefill_work import PrefillWork
from mla_router.worker.kernels.attention.ragged_attention import tiling as prefill
from mla_router.worker.kernels.attention.ragged_attention.kernel import ragged_attention_triton
from mla_router.worker.kernels.attention.rope_absorb import rope_absorb_triton
from mla_router.worker.kernels.attention.tree_tail import TreeTail, one_part_each
from mla_router.worker.kernels.device import (
    H200,
    Limits,
    UnsupportedDevice,
    check_architecture,
    limits,
)
from mla_router.worker.kernels.few_rows import MAX_INPUTS, few_rows_linear, shared_bytes
from mla_router.worker.kernels.kv_cache.gather import kv_gather_triton
from mla_router.worker.kernels.kv_cache.rope_gqa_write import rope_gqa_write_triton
from mla_router.worker.kernels.kv_cache.rope_kv_write import rope_kv_write_triton
from mla_router.worker.kernels.linear import linear_triton
from mla_router.worker.kernels.moe.experts import moe_experts_triton
from mla_router.worker.kernels.moe.routing import RoutingRule, moe_routing_triton
from mla_router.worker.kernels.moe.tiling import MoeShape, MoeTiling, Tile, default_tiling
from mla_router.worker.kernels.norm_linear import norm_linear_triton
from mla_router.worker.kernels.rms_norm import add_rms_norm_triton
from mla_router.worker.kernels.sampling.sample import sample_triton
from mla_router.worker.kernels.silu_and_mul import silu_and_mul_triton
from mla_router.worker.kernels.weight import Weight
from support.architectures import A100, B200, L40S, LIMITS, OTHERS, compiling_for
from support.sm90 import compile_sm90

META = torch.device("meta")
meta = partial(torch.empty, dtype=torch.bfloat16, device=META)
integers = partial(torch.empty, dtype=torch.int32, device=META)
V2_LITE = MoeShape(64, 2048, 1408, torch.bfloat16)


def decode_attention(heads: int, requests: int, queries: int) -> None:
    chosen = tiling(heads, requests, queries, on=limits(META))
    lengths = integers(requests)
    parts = num_parts(chosen, heads, queries, META)
    schedule = decode_schedule_torch(lengths, max_length=4096, tiling=chosen, num_parts=parts)
    q = meta(requests * queries, heads, 576)
    table, cache = integers(64, 64), meta(100, 64, 576)
    mla_decode_triton(
        *q.split([512, 64], dim=-1),
        cache,
        table,
        lengths.long(),
        lengths,
        schedule,
        scale=0.1,
        queries=queries,
    )


def grouped_query_attention(
    heads: int,
    groups: int,
    width: int,
    v_head_dim: int,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    row = width + v_head_dim
    chosen = gqa_tiling(heads // groups, row, head_dim=width, on=limits(META))
    lengths = integers(8)
    gqa_decode_triton(
        meta(8, heads, width),
        meta(100, 64, groups * row),
        integers(64, 64),
        lengths.long(),
        lengths,
        decode_schedule_torch(lengths, max_length=8192, tiling=chosen, num_parts=64, window=window),
        meta(8, heads, v_head_dim),
        scale=0.1,
        softcap=softcap,
    )


def trees(heads: int, groups: int, width: int, nodes: int) -> None:
    chosen = gqa_tiling(heads // groups * nodes, 2 * width, on=limits(META))
    lengths, rows = integers(8), 8 * nodes
    tail = TreeTail(integers(rows).long(), nodes, nodes, 6400, one_part_each(8, chosen, META))
    gqa_decode_triton(
        meta(rows, heads, width),
        meta(100, 64, groups * 2 * width),
        integers(64, 64),
        lengths.long(),
        lengths,
        decode_schedule_torch(lengths, max_length=8192, tiling=chosen, num_parts=64),
        meta(rows, heads, width),
        scale=0.1,
        tail=tail,
    )


def latent_trees(heads: int, nodes: int) -> None:
    chosen = tiling(heads, 8, nodes, on=limits(META))
    lengths, rows = integers(8), 8 * nodes
    tail = TreeTail(integers(rows).long(), nodes, nodes, 6400, one_part_each(8, chosen, META))
    mla_decode_triton(
        *meta(rows, heads, 576).split([512, 64], dim=-1),
        meta(200, 64, 576),
        integers(64, 64),
        lengths.long(),
        lengths,
        decode_schedule_torch(lengths, max_length=4096, tiling=chosen, num_parts=64),
        scale=0.1,
        settled=True,
        tail=tail,
    )


def prefill_attention(rows: int, shared: int) -> None:
    work = PrefillWork.on("meta", [(rows, 4096)], heads=16)
    kv, k_pe = meta(4096, 16, 256), meta(4096, 576)[:, 512:]
    shared_keys = k_pe if shared else None
    q = meta(rows, 16, 128 + shared)
    ragged_attention_triton(q, kv[..., :128], kv[..., 128:], shared_keys, work, scale=0.1)


def gemma(rows: int) -> None:
    """Gemma 2 9B's attention, with its widest heads."""
    grouped_query_attention(16, 8, 256, 256, 4096, 50.0)
    few = prefill.block_queries(256, 256, limits(META))
    work = PrefillWork.on("meta", [(rows, 8192)], heads=16, block_queries=few, window=4096)
    k, v = meta(2, 8192, 8, 256)
    ragged_attention_triton(meta(rows, 16, 256), k, v, None, work, scale=0.1, softcap=50.0)


def experts(tokens: int) -> None:
    logits = torch.empty(tokens, 64, device=META)
    weights, ids = moe_routing_triton(logits, RoutingRule(6, "softmax"))
    gate_up, down = meta(64, 2816, 2048), meta(64, 2048, 1408)
    chosen = default_tiling(V2_LITE, tokens, 6, limits(META))
    moe_experts_triton(meta(tokens, 2048), gate_up, down, weights, ids, tiling=chosen)


def small_ops() -> None:
    """Launches kernels with the same tiles on all GPUs; products of few rows only where they fit."""
    x = meta(8, 2048)
    add_rms_norm_triton(x, x, x[0], 1e-6)
    silu_and_mul_triton(x)
    linear_triton(x[:1], meta(3648, 2048), out_dtype=x.dtype)
    norm_linear_triton(x[:1], x[:1], x[0], 1e-6, meta(3648, 2048), out_dtype=x.dtype)
    norm_linear_triton(meta(65, 2048), None, x[0], 1e-6, meta(64, 2048), out_dtype=x.dtype)
    for inputs in (2048, MAX_INPUTS):
        if shared_bytes(inputs) <= limits(META).shared_bytes:
            few_rows_linear(meta(8, inputs), meta(2048, inputs), out_dtype=x.dtype)
    q, kv = torch.split(meta(8, 16 * 192 + 576), [16 * 192, 576], dim=-1)
    rotations, locations = (
        torch.empty(8, 32, dtype=torch.complex64, device=META),
        integers(8).long(),
    )
    rows = (q.view(8, 16, 192), kv, meta(512), 1e-6, rotations, meta(9, 64, 576), locations)
    w_uk, w_uv = (Weight(w, constant=True) for w in meta(16, 256, 512).split(128, dim=1))
    rope_absorb_triton(*rows, w_uk, interleaved=True, settled=True)
    rope_kv_write_triton(*rows, interleaved=True, in_place=True)
    expand_values_triton(meta(8, 16, 512), w_uv, meta(8, 16, 128))
    q, k, v = meta(8, 48, 128).split([32, 8, 8], dim=1)
    rotations = torch.empty(8, 64, dtype=torch.complex64, device=META)
    rope_gqa_write_triton(
        q, k[..., :0], k, v, rotations, meta(100, 64, 2048), locations, interleaved=False
    )
    decode_schedule_triton(
        integers(8), max_length=4096, tiling=tiling(16, 8, on=H200), num_parts=264
    )
    cache, table = meta(4096, 64, 576), integers(128, 512)
    kv_gather_triton(cache, table, locations[:7], integers(7), integers(8), 8192)
    logits, some = torch.empty(8, 102_400, device=META), torch.empty(8, device=META)
    lengths = locations.int()
    sample_triton(logits, locations, lengths, some, locations, None, locations, locations.int())


def launches() -> None:
    """Each kernel on each GPU."""
    for found in OTHERS:
        with compiling_for(found):
            decode_attention(16, 64, 1)
            decode_attention(128, 64, 1)
            grouped_query_attention(32, 8, 128, 128)
            prefill_attention(4096, 64)
            gemma(4096)
            if found is L40S:
                continue  # its other tiles are an A100's
            for tokens in (2, 512):
                experts(tokens)
            small_ops()


def launches_of_other_tiles() -> None:
    for found in OTHERS:
        with compiling_for(found):
            decode_attention(16, 1, 1)
            decode_attention(16, 64, 2)
            grouped_query_attention(16, 16, 192, 128)
            trees(32, 8, 128, 8)
            trees(32, 8, 64, 64)
            latent_trees(16, 8)
            latent_trees(16, 64)
            for rows, shared in ((64, 64), (4096, 0)):
                prefill_attention(rows, shared)
            gemma(64)
            if found is not L40S:
                for tokens in (32, 8192):
                    experts(tokens)


def test_compiled_for_other_gpus() -> None:
    check_on_others(launches)


@pytest.mark.slow
def test_other_tiles_compiled_for_other_gpus() -> None:
    check_on_others(launches_of_other_tiles)


def check_on_others(launched: Callable[[], None]) -> None:
    reports = compile_sm90(launched)
    assert {report.architecture for report in reports} == {80, 89, 100}
    for report in reports:
        found = LIMITS[report.architecture]
        assert report.shared_bytes <= found.shared_bytes, report
        # As on an H200, tiles of 64 query rows keep addresses on the stack
        tall = report.kernel == "attend_kernel" and report.constants["BLOCK_ROWS"] == 64
        # The merge of two lists of parts takes all registers of some GPUs
        most = 128 if tall else 16 if report.kernel == "merge_kernel" else 0
        assert report.spill_bytes <= most, report
        report.check_order()


@pytest.mark.parametrize("found", LIMITS.values(), ids=lambda found: f"sm_{found.architecture}")
def test_tiles_are_within_the_limits(found: Limits) -> None:
    """The computed shared memory is at least the compiler's (`test_compiled_for_other_gpus`)."""
    for heads, requests, queries in product((1, 16, 128), (1, 2, 300), (1, 2, 4)):
        chosen = tiling(heads, requests, queries, on=found)
        needed = chosen.shared_bytes(576, 576)
        assert needed <= found.shared_bytes and chosen.programs_per_sm <= found.resident(needed)
    for share, width in product((1, 4, 16, 128), (64, 256, 320, 512)):
        chosen = gqa_tiling(share, width, on=found)
        needed = chosen.shared_bytes(width // 2, width)
        assert needed <= found.shared_bytes and chosen.programs_per_sm <= found.resident(needed)
    for rows, programs in product((64, 128), (1, 1000)):
        tiles = prefill.tiling(rows, 2, programs, on=found)
        assert prefill.shared_bytes_of(tiles, rows, 192, 128, found) <= found.shared_bytes


def test_tilings_of_an_h200() -> None:
    """A change of limits or candidates must not change the tiles that were measured on an H200."""
    narrow = Tiling(16, 32, 4, 3, 2, 8, 2)
    wide = Tiling(16, 64, 4, 3, 1, hopper=True)
    assert {tiling(16, requests, on=H200) for requests in (1, 64, 240)} == {wide}
    assert {tiling(16, requests, on=H200) for requests in (241, 1000)} == {narrow}
    assert tiling(16, 64, 2, on=H200) == Tiling(32, 64, 4, 3, 1, hopper=True)
    for heads, queries in ((16, 4), (128, 1)):
        assert tiling(heads, 64, queries, on=H200) == Tiling(64, 128, 4, 2, 1, hopper=True)
    assert gqa_tiling(1, 128, on=H200) == Tiling(16, 64, 4, 3, 4, 1, 2)
    assert gqa_tiling(4, 256, on=H200) == Tiling(16, 64, 4, 3, 3, 1, 1)
    assert gqa_tiling(4, 256, num_kv_heads=8, on=H200) == Tiling(16, 64, 4, 2, 4, 1, 1)
    assert gqa_tiling(1, 320, head_dim=192, on=H200) == Tiling(16, 32, 4, 3, 3, 1, 2)
    assert gqa_tiling(16, 512, on=H200) == Tiling(16, 32, 8, 3, 2, 1, 1)
    assert gqa_tiling(32, 256, on=H200) == Tiling(32, 64, 4, 3, 2, 1, 2)
    assert gqa_tiling(128, 256, on=H200) == Tiling(64, 64, 4, 3, 1, 1, 2)
    for programs, stages in ((264, 3), (265, 2)):
        assert prefill.tiling(64, 2, programs) == prefill.Tiling(64, 4, stages)
        assert prefill.tiling(128, 2, programs) == prefill.Tiling(64, 8, 3)
    assert default_tiling(V2_LITE, 8, 6) == MoeTiling(
        16, Tile(32, 256, 8, 4, 3), Tile(128, 128, 2, 4, 3)
    )
    many = MoeTiling(128, Tile(128, 64, 4, 8, 4), Tile(256, 64, 1, 8, 4))
    assert default_tiling(V2_LITE, 1024, 6) == many
    assert default_tiling(V2_LITE, 8192, 6) == MoeTiling(
        128, replace(many.gate_up, group_m=2), replace(many.down, group_m=2)
    )


def test_wide_heads_decide_the_query_rows_of_prefill() -> None:
    rows = {found.architecture: prefill.block_queries(256, 256, found) for found in LIMITS.values()}
    assert rows == {80: 64, 89: 64, 90: 128, 100: 0}
    assert {prefill.block_queries(192, 128, found) for found in LIMITS.values()} == {0}


def test_limits_are_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        major, minor, multi_processor_count = 8, 9, 142
        shared_memory_per_block_optin, shared_memory_per_multiprocessor = 101_376, 102_400
        regs_per_multiprocessor = 65_536

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(device, "_read", device._read.__wrapped__)
    assert limits(torch.device("cuda", 7)) == L40S


@pytest.mark.parametrize("architecture", [70, 75, 110, 120])
def test_unknown_gpus_are_refused(architecture: int) -> None:
    with pytest.raises(UnsupportedDevice, match=rf"compute capability {architecture / 10}: "):
        check_architecture(replace(H200, architecture=architecture))
    for found in LIMITS.values():
        check_architecture(found)


def test_tiles_of_a_b200_do_not_need_tensor_memory() -> None:
    """Triton compiles 64 query rows to a trap there."""
    assert tiling(128, 64, on=B200) == tiling(16, 64, 4, on=B200) == Tiling(32, 64, 8, 2, 1, 2, 1)


def test_products_of_few_rows_are_the_librarys_where_they_do_not_fit() -> None:
    assert shared_bytes(MAX_INPUTS) == 114_688
    assert [
        shared_bytes(MAX_INPUTS) <= found.shared_bytes for found in (A100, L40S, B200, H200)
    ] == [
        True,
        False,
        True,
        True,
    ]
