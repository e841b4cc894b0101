"""FP8 caches: the definition against a search among all numbers of a format, and the kernels against the definition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.rope_absorb import rope_absorb_triton
from mla_router.worker.kernels.kv_cache.fp8 import (
    FORMATS,
    KVScales,
    as_bytes,
    from_cache,
    is_fp8,
    to_cache,
)
from mla_router.worker.kernels.kv_cache.gather import kv_gather_torch, kv_gather_triton, kv_take
from mla_router.worker.kernels.kv_cache.read import kv_read
from mla_router.worker.kernels.kv_cache.rope_gqa_write import (
    rope_gqa_write_torch,
    rope_gqa_write_triton,
)
from mla_router.worker.kernels.kv_cache.rope_kv_write import (
    rope_kv_write_torch,
    rope_kv_write_triton,
)
from mla_router.worker.kernels.weight import Weight
from support.architectures import OTHERS, compiling_for
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

DTYPES = list(FORMATS.values())
INFINITY = float("inf")


def numbers(exponent: int, mantissa: int, bias: int, largest: float) -> list[float]:
    """Returns the finite numbers of a format from 0 on, in ascending order, by the formula of their bits."""
    found = []
    for e in range(1 << exponent):
        for m in range(1 << mantissa):
            fraction = m / (1 << mantissa)
            found.append((1 + fraction) * 2.0 ** (e - bias) if e else fraction * 2.0 ** (1 - bias))
    return [x for x in found if x <= largest]


NUMBERS = {
    torch.float8_e4m3fn: numbers(4, 3, 7, 448.0),
    torch.float8_e5m2: numbers(5, 2, 15, 57344.0),
}


def nearest(x: float, among: list[float]) -> float:
    """Returns the nearest number; of two, the one with an even last bit, whose index is even."""
    index = min(range(len(among)), key=lambda i: (abs(among[i] - abs(x)), i % 2))
    return among[index] if x >= 0 else -among[index]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_to_the_nearest_number(dtype: torch.dtype) -> None:
    """All numbers of the format, the middles between neighbours, and numbers beside the middles."""
    own = NUMBERS[dtype]
    middles = [(low + high) / 2 for low, high in pairwise(own)]
    beside = [x * factor for x in middles for factor in (1 - 2**-20, 1 + 2**-20)]
    values = [sign * x for x in (*own, *middles, *beside) for sign in (1, -1)]
    stored = to_cache(torch.tensor(values), dtype)
    assert stored.dtype == dtype
    assert stored.double().tolist() == [nearest(x, own) for x in values]


@pytest.mark.parametrize("dtype", DTYPES)
def test_saturates(dtype: torch.dtype) -> None:
    largest = NUMBERS[dtype][-1]
    beyond = torch.tensor([1.03, 1.2, 2.0, 1e30, INFINITY]) * largest
    assert (to_cache(beyond, dtype).float() == largest).all()
    assert (to_cache(-beyond, dtype).float() == -largest).all()
    assert to_cache(torch.tensor(float("nan")), dtype).isnan()


def test_scales() -> None:
    x = torch.tensor([3.0, -900.0, 0.007])
    stored = to_cache(x, torch.float8_e4m3fn, 2.0)
    assert stored.double().tolist() == [1.5, -448.0, 0.00390625]  # 0.0035 is nearest to 2^-8
    assert from_cache(stored, torch.bfloat16, 2.0).tolist() == [3.0, -896.0, 0.0078125]
    assert from_cache(stored, torch.bfloat16, 2.0).dtype == torch.bfloat16


def test_other_dtypes_have_no_scale() -> None:
    x = torch.tensor([1.01, 70000.0])
    assert torch.equal(to_cache(x, torch.bfloat16, 2.0), x.bfloat16())
    assert torch.equal(from_cache(x.bfloat16(), torch.float32, 2.0), x.bfloat16().float())
    assert not is_fp8(torch.bfloat16) and as_bytes(x) is x


def random_rows(dtype: torch.dtype, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(len(shape))
    return (torch.randn(*shape, generator=draw) * 20).to(dtype)


@pytest.mark.parametrize("out", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_rows_are_dequantized(dtype: torch.dtype, out: torch.dtype) -> None:
    cache = random_rows(dtype, 5, 4, 12)
    table = torch.tensor([[4, 1, 0], [2, 3, 0]], dtype=torch.int32)
    spans = (torch.tensor([1, 0]), torch.tensor([2, 0]).int(), torch.tensor([0, 5, 8]).int())
    flat = cache.double().view(-1, 12)
    rows = torch.cat((flat[[2 * 4 + 2, 2 * 4 + 3, 12, 13, 14]], flat[[16, 17, 18]]))
    for scales, column in ((KVScales(0.37, 3.0), 8), (KVScales(1.7, 1.7), 0)):
        factors = torch.full((12,), scales.values)
        factors[:column] = scales.keys
        expected = (rows.float() * factors).to(out)
        for gather, device in ((kv_gather_torch, "cpu"), (kv_gather_triton, DEVICE)):
            operands = (x.to(device) for x in (cache, table, *spans))
            got = gather(*operands, 8, dtype=out, scales=scales, value_column=column)
            if DEVICE == "cpu" and out != torch.float32 and gather is kv_gather_triton:
                # The interpreter truncates
                torch.testing.assert_close(got, expected, rtol=2**-10, atol=0)
            else:
                assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_requests_are_read_as_they_are_stored(dtype: torch.dtype) -> None:
    cache, table = random_rows(dtype, 4, 2, 6), torch.tensor([[3, 1]], dtype=torch.int32)
    for length, pages in ((3, [3, 1]), (2, [3])):
        got = kv_read(cache, table, [(0, 0, length)])
        assert got.dtype == dtype
        assert torch.equal(got.float(), cache.float()[pages].flatten(0, 1)[:length])
    taken = kv_take(cache, torch.tensor([5, 2]), dtype=torch.float32)
    assert torch.equal(taken, cache.float().view(-1, 6)[[5, 2]])


def assert_stored(got: Tensor, expected: Tensor) -> None:
    """Compares stored numbers bit by bit. The interpreter rounds subnormal numbers down, and some to the power of two
    above: with it these are left out."""
    same = as_bytes(got.cpu()) == as_bytes(expected.cpu())
    if DEVICE == "cpu":
        wide = expected.float()
        same |= (wide.frexp().mantissa.abs() == 0.5) | (wide.abs() < torch.finfo(got.dtype).tiny)
    assert same.all(), (got[~same], expected[~same])
    assert same.float().mean() > 0.8


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_written(dtype: torch.dtype, interleaved: bool, in_place: bool) -> None:
    """With `in_place` the new rows have the numbers that are later read from the cache, rotary keys as well."""
    draw = torch.Generator().manual_seed(1)
    q, kv = torch.randn(5, 3, 24, generator=draw), torch.randn(5, 40, generator=draw) * 300
    kv[2, 3] = kv[2, 33] = 1e9  # beyond the range
    weight = torch.rand(32, generator=draw) * 20
    angles = 6 * torch.rand(5, 4, generator=draw)
    rotations = torch.polar(torch.ones_like(angles), angles)
    locations = torch.tensor([6, 4, 11, 5, 7])
    rows = []
    for op, device in ((rope_kv_write_torch, "cpu"), (rope_kv_write_triton, DEVICE)):
        own_q, own, *rest = (x.to(device).clone() for x in (q, kv, weight, rotations, locations))
        cache = torch.zeros(3, 4, 40).to(dtype).to(device)
        op(
            own_q,
            own,
            rest[0],
            1e-6,
            rest[1],
            cache,
            rest[2],
            interleaved=interleaved,
            in_place=in_place,
            kv_scale=0.3,
        )
        stored = as_bytes(cache).flatten(0, 1)[rest[2]].view(dtype)
        rows.append(stored)
        wanted = stored.float() * 0.3 if in_place else kv.to(device)
        assert torch.equal(own, wanted)
    assert rows[0].float().isfinite().all() and rows[0].float().abs().max() == NUMBERS[dtype][-1]
    assert_stored(rows[1], rows[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_written(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    q, k_pe, v = (torch.randn(5, n, 8, generator=draw) * 50 for n in (4, 2, 2))
    k = torch.randn(5, 2, 6, generator=draw)
    q = torch.cat((torch.randn(5, 4, 6, generator=draw), q), dim=-1)
    angles = 6 * torch.rand(5, 4, generator=draw)
    rotations = torch.polar(torch.ones_like(angles), angles)
    locations = torch.tensor([6, 4, 11, 5, 7])
    rows = []
    ways: list[tuple[Callable[..., None], str]] = [
        (rope_gqa_write_torch, "cpu"),
        (rope_gqa_write_triton, DEVICE),
    ]
    for op, device in ways:
        cache = torch.zeros(3, 4, 2 * (14 + 8)).to(dtype).to(device)
        operands = [x.to(device).clone() for x in (q, k, k_pe, v, rotations)]
        at = locations.to(device)
        op(*operands, cache, at, interleaved=True, scales=KVScales(2.5, 0.1))
        rows.append(as_bytes(cache).flatten(0, 1)[at].view(dtype))
    assert_stored(rows[1], rows[0])
    keys, values = rows[0].float().split([28, 16], dim=-1)
    plain = keys.view(5, 2, 14)[..., :6] * 2.5
    step = 2.0 ** -(2 + (dtype == torch.float8_e4m3fn))
    torch.testing.assert_close(plain, k, rtol=step, atol=2.5 * NUMBERS[dtype][1])
    limited = v.flatten(1).clamp(-0.1 * NUMBERS[dtype][-1], 0.1 * NUMBERS[dtype][-1])
    torch.testing.assert_close(values * 0.1, limited, rtol=step, atol=0.1 * NUMBERS[dtype][1])


def launches() -> None:
    """Launches writes and the gathering of rows, at the shapes of V2-Lite and Llama 3 8B."""
    with torch.device("meta"):
        for dtype in DTYPES:
            launch(dtype)


def launches_on_others() -> None:
    for found in OTHERS:
        with compiling_for(found), torch.device("meta"):
            # E4M3 is refused before compute capability 8.9
            launch(DTYPES[found.architecture < 89])


def launch(dtype: torch.dtype) -> None:
    meta = partial(torch.empty, dtype=torch.bfloat16)
    integers, locations = torch.empty(8, dtype=torch.int32), torch.empty(8, dtype=torch.int64)
    q, kv = torch.split(meta(8, 16 * 192 + 576), [16 * 192, 576], dim=-1)
    rotations = torch.empty(8, 32, dtype=torch.complex64)
    latents = torch.empty(100, 64, 576, dtype=dtype)
    written = (q.view(8, 16, 192), kv, meta(512), 1e-6, rotations, latents, locations)
    for in_place in (True, False):
        rope_kv_write_triton(*written, interleaved=True, in_place=in_place, kv_scale=0.3)
    w_uk = Weight(meta(16, 128, 512), constant=True)
    rope_absorb_triton(*written, w_uk, interleaved=True, settled=True, kv_scale=0.3)
    q, k, v = torch.split(meta(8, 48, 128), [32, 8, 8], dim=1)
    rows, scales = torch.empty(100, 64, 2048, dtype=dtype), KVScales(0.3, 0.7)
    turns = torch.empty(8, 64, dtype=torch.complex64)
    operands = (q, k[..., :0], k, v, turns, rows, locations)
    rope_gqa_write_triton(*operands, interleaved=False, scales=scales)
    table, starts = torch.empty(128, 512, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
    for cache, column in ((latents, 0), (rows, 1024)):
        place = (cache, table, locations, integers, starts, 8192)
        kv_gather_triton(*place, dtype=torch.bfloat16, scales=scales, value_column=column)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()


@pytest.mark.slow
def test_compiled_for_other_gpus() -> None:
    reports = compile_sm90(launches_on_others)
    assert {report.architecture for report in reports} == {80, 89, 100}
    for report in reports:
        report.check()
