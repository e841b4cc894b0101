"""The rule of programmatic dependent launch, in code compiled for sm_90."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from mla_router.worker.kernels import pdl
from mla_router.worker.kernels.attention.decode_schedule import (
    decode_schedule_torch,
    decode_schedule_triton,
)
from mla_router.worker.kernels.attention.decode_tiling import gqa_tiling, tiling
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode_triton
from mla_router.worker.kernels.attention.mla_decode import mla_decode_triton
from mla_router.worker.kernels.attention.rope_absorb import rope_absorb_triton
from mla_router.worker.kernels.device import H200
from mla_router.worker.kernels.kv_cache.rope_gqa_write import rope_gqa_write_triton
from mla_router.worker.kernels.kv_cache.rope_kv_write import rope_kv_write_triton
from mla_router.worker.kernels.linear import linear_triton
from mla_router.worker.kernels.moe.experts import moe_experts_triton
from mla_router.worker.kernels.moe.routing import RoutingRule, moe_routing_triton
from mla_router.worker.kernels.moe.tiling import MoeShape, default_tiling
from mla_router.worker.kernels.norm_linear import norm_linear_triton
from mla_router.worker.kernels.pdl import launch_options, reads_early, wait_for_previous
from mla_router.worker.kernels.rms_norm import add_rms_norm_triton
from mla_router.worker.kernels.sampling.sample import sample_triton
from mla_router.worker.kernels.silu_and_mul import silu_and_mul_triton
from mla_router.worker.kernels.weight import Weight
from support.sm90 import compile_sm90


@triton.jit
def _waiting(x, N: tl.constexpr):
    wait_for_previous()
    at = x + tl.program_id(0) * N + tl.arange(0, N)
    tl.store(at, tl.load(at) + 1)


@triton.jit
def _reading_ahead(x, N: tl.constexpr):
    at = x + tl.program_id(0) * N + tl.arange(0, N)
    ahead = tl.load(at)
    wait_for_previous()
    tl.store(at, ahead + 1)


@reads_early({"AHEAD": ("weight",)})
@triton.jit
def _reading_a_constant_ahead(x, weight, chosen, N: tl.constexpr, AHEAD: tl.constexpr):
    column = tl.arange(0, N)
    if not AHEAD:
        wait_for_previous()
    ahead = tl.load(weight + column)
    wait_for_previous()
    tl.store(x + column, ahead + tl.load(weight + tl.load(chosen) * N + column))


@reads_early({"AHEAD": ("weight",)})
@triton.jit
def _reading_another_ahead(x, weight, chosen, N: tl.constexpr, AHEAD: tl.constexpr):
    column = tl.arange(0, N)
    if not AHEAD:
        wait_for_previous()
    ahead = tl.load(weight + column) + tl.load(x + column)
    wait_for_previous()
    tl.store(x + column, ahead + tl.load(chosen))


@reads_early({"AHEAD": ("weight",)})
@triton.jit
def _choosing_ahead(x, weight, chosen, N: tl.constexpr, AHEAD: tl.constexpr):
    column = tl.arange(0, N)
    if not AHEAD:
        wait_for_previous()
    ahead = tl.load(weight + tl.load(chosen) * N + column)
    wait_for_previous()
    tl.store(x + column, ahead)


@reads_early({"AHEAD": ("weight",)})
@triton.jit
def _reading_either_ahead(x, weight, chosen, N: tl.constexpr, AHEAD: tl.constexpr):
    column = tl.arange(0, N)
    if not AHEAD:
        wait_for_previous()
    ahead = tl.load(tl.where(tl.program_id(0) % 2 == 0, weight + column, x + column))
    wait_for_previous()
    tl.store(x + column, ahead + tl.load(chosen))


@triton.jit
def _leaving_ahead(x, N: tl.constexpr):
    if tl.program_id(0) > 5:
        return
    wait_for_previous()
    tl.store(x + tl.arange(0, N), 1.0)


@triton.jit
def _not_waiting(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1.0)


def rule_and_breaches() -> None:
    x = torch.empty(1024, device="meta")
    for kernel in (_waiting, _reading_ahead, _leaving_ahead, _not_waiting):
        kernel[(8,)](x, N=128, **launch_options())


def test_breaches_are_seen() -> None:
    waiting, reading, *breaches = compile_sm90(rule_and_breaches)
    assert waiting.starts_early and waiting.waits and not waiting.reads_ahead
    waiting.check()
    with pytest.raises(AssertionError, match=r"reads \['x'\] before it waits for the last"):
        reading.check()
    for breach in breaches:
        assert breach.starts_early, breach
        with pytest.raises(AssertionError, match="does not wait for the last"):
            breach.check()


def declared_and_not() -> None:
    x, chosen = torch.empty(1024, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")
    for kernel in (
        _reading_a_constant_ahead,
        _reading_another_ahead,
        _choosing_ahead,
        _reading_either_ahead,
    ):
        for ahead in (True, False):
            kernel[(8,)](x, x, chosen, N=128, AHEAD=ahead, **launch_options())


def test_each_early_load_is_of_a_declared_argument() -> None:
    reports = compile_sm90(declared_and_not)
    for report in reports[1::2]:
        report.check()
        assert not report.reads_early, report
    constant, another, choosing, either = reports[::2]
    constant.check()
    assert constant.reads_early == ["weight"]
    for breach, read in ((another, "x"), (choosing, "chosen"), (either, "x")):
        assert breach.reads_early == sorted(["weight", read]), breach
        with pytest.raises(AssertionError, match=rf"reads \['{read}'\] before it waits"):
            breach.check()


def switched_off() -> None:
    pdl.ENABLED = False
    _not_waiting[(8,)](torch.empty(1024, device="meta"), N=128, **launch_options())


def test_switched_off() -> None:
    (report,) = compile_sm90(switched_off)
    assert not report.starts_early
    report.check()


def decode_step() -> None:
    """Launches the kernels of a decode step of V2-Lite, and Llama's attention."""
    x = torch.empty(8, 2048, dtype=torch.bfloat16, device="meta")
    add_rms_norm_triton(x, x, x[0], 1e-6)
    linear_triton(x[:1], x.new_empty(3648, 2048), out_dtype=x.dtype)
    norm_linear_triton(x[:1], x[:1], x[0], 1e-6, x.new_empty(3648, 2048), out_dtype=x.dtype)
    silu_and_mul_triton(x)

    cache, q = x.new_empty(100, 64, 576), x.new_empty(8, 16, 576)
    locations = torch.empty(8, dtype=torch.int64, device="meta")
    rotations = torch.empty(8, 32, dtype=torch.complex64, device="meta")
    rope_kv_write_triton(
        q, q[:, 0], q[0, 0, :512], 1e-6, rotations, cache, locations, interleaved=True
    )
    w_uk = Weight(x.new_empty(16, 512, 512))
    rope_absorb_triton(
        q, q[:, 0], q[0, 0, :512], 1e-6, rotations, cache, locations, w_uk, interleaved=True
    )
    lengths, chosen = locations.int(), tiling(16, 8, on=H200)
    decode_schedule_triton(lengths, max_length=4096, tiling=chosen, num_parts=264)
    mla_decode_triton(
        *q.split([512, 64], dim=-1),
        cache,
        torch.empty(64, 64, dtype=torch.int32, device="meta"),
        locations,
        lengths,
        decode_schedule_torch(lengths, max_length=4096, tiling=chosen, num_parts=264),
        scale=0.1,
    )
    for tokens in (1, 8, 128):
        weights, ids = moe_routing_triton(
            torch.empty(tokens, 64, device="meta"), RoutingRule(6, "softmax")
        )
        moe_experts_triton(
            x.new_empty(tokens, 2048),
            x.new_empty(64, 2816, 2048),
            x.new_empty(64, 2048, 1408),
            weights,
            ids,
            tiling=default_tiling(MoeShape(64, 2048, 1408, x.dtype), tokens, 6),
        )
    grouped_query_attention(settled=False)
    logits = torch.empty(8, 102400, device="meta")
    some = logits[:, 0].contiguous()
    lengths = locations.int()
    sample_triton(logits, locations, lengths, some, locations, None, locations, locations.int())


def test_every_kernel_of_a_decode_step_starts_early() -> None:
    for report in compile_sm90(decode_step):
        assert report.starts_early and report.waits and not report.reads_ahead, report


def grouped_query_attention(*, settled: bool) -> None:
    q, k, v = torch.empty(8, 48, 128, dtype=torch.bfloat16, device="meta").split([32, 8, 8], dim=1)
    cache = q.new_empty(100, 64, 2048)
    locations = torch.empty(8, dtype=torch.int64, device="meta")
    rotations = torch.empty(8, 64, dtype=torch.complex64, device="meta")
    rope_gqa_write_triton(
        q, k[..., :0], k, v, rotations, cache, locations, interleaved=False, settled=settled
    )
    lengths, chosen = locations.int(), gqa_tiling(4, 256, on=H200)
    gqa_decode_triton(
        q,
        cache,
        torch.empty(64, 64, dtype=torch.int32, device="meta"),
        locations,
        lengths,
        decode_schedule_torch(lengths, max_length=4096, tiling=chosen, num_parts=49),
        q.new_empty(8, 32, 128),
        scale=0.1,
        settled=settled,
    )


def settled_grouped_query_attention() -> None:
    grouped_query_attention(settled=True)


def test_settled_arguments_of_grouped_query_attention_are_read_early() -> None:
    for report in compile_sm90(settled_grouped_query_attention):
        report.check()
        assert report.reads_ahead, report
