"""Products with quantized W_UK and W_UV of each head, against float64 of the numbers of both operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.absorb import (
    absorb_queries_torch,
    absorb_queries_triton,
    expand_values_torch,
    expand_values_triton,
)
from mla_router.worker.kernels.attention.absorb_quantized import (
    StaticFP8,
    has_kernel,
    takes_heads,
)
from mla_router.worker.kernels.attention.rope_absorb import rope_absorb_triton
from mla_router.worker.kernels.device import H200, Limits
from mla_router.worker.kernels.weight import Weight
from support.architectures import A100, B200, L40S, LIMITS, compiling_for
from support.corners import corners
from support.quantized import drawn_weight, numbers, relative_error
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEADS, NOPE, LATENT, VALUE = 3, 128, 256, 128
BLOCKS = [(128, 128), (1, LATENT)]  # DeepSeek's, and a scale a row
BOUND = 3e-4  # results are rounded to the 11 bits of float16
BLOCKS_OF_MODELS = [(128, 128), (1, 512)]


def drawn(block: tuple[int, int], dtype: torch.dtype = E4M3, *, constant: bool) -> list[Weight]:
    """Returns W_UK and W_UV: views of one matrix."""
    weight = drawn_weight(HEADS * (NOPE + VALUE), LATENT, dtype=dtype, block=block, device=DEVICE)
    return weight._replace(constant=constant).split_heads((NOPE, VALUE))


def rows(tokens: int, columns: int) -> Tensor:
    """Views of wider rows, float16: the interpreter does not multiply bfloat16. Rows differ much in size. All numbers are
    multiples of a power of 2 that FP8 has as well: the interpreter's conversions do not carry."""
    draw = torch.Generator().manual_seed(tokens + columns)
    x = torch.randint(-4, 5, (tokens, HEADS, columns + 8), generator=draw) / 4
    x *= 2.0 ** torch.randint(-3, 4, (tokens, HEADS, 1), generator=draw)
    return x.to(DEVICE, torch.float16)[..., :columns]


def exact(x: Tensor, weight: Weight, equation: str) -> Tensor:
    return torch.einsum(equation, x.double(), numbers(weight))


@pytest.mark.parametrize(
    ("rows_of", "block", "dtype"),
    corners([(1, True), (5, False), (17, True), (70, False)], BLOCKS, [E4M3, torch.int8]),
)
def test_cast_at_use(rows_of: tuple[int, bool], block: tuple[int, int], dtype: torch.dtype) -> None:
    """Only the results are rounded. The rest of the memory around the values does not change."""
    tokens, constant = rows_of
    w_uk, w_uv = drawn(block, dtype, constant=constant)
    q, latent = rows(tokens, NOPE), rows(tokens, LATENT)
    wide = torch.full((tokens, HEADS, VALUE + 8), 7.0, dtype=q.dtype, device=DEVICE)
    expand_values_triton(latent, w_uv, wide[..., :VALUE])
    assert (wide[..., VALUE:] == 7).all()
    for got, expected in (
        (absorb_queries_triton(q, w_uk), exact(q, w_uk, "thd,hdc->thc")),
        (wide[..., :VALUE], exact(latent, w_uv, "thc,hvc->thv")),
    ):
        # With a scale for each row inputs times scales are rounded as well
        assert relative_error(got, expected) < (BOUND if block[0] == 128 else 2 * BOUND)


@pytest.mark.parametrize(("tokens", "constant"), [(1, True), (17, False)])
@pytest.mark.parametrize("fp8", [StaticFP8(E4M3, 0.5), StaticFP8(E5M2)])
@pytest.mark.parametrize("block", BLOCKS)
def test_static_form(tokens: int, constant: bool, block: tuple[int, int], fp8: StaticFP8) -> None:
    """FP8 has the inputs exactly, and their products with scales that are powers of 2."""
    q, latent = rows(tokens, NOPE), rows(tokens, LATENT)
    w_uk, w_uv = (
        weight._replace(scales=weight.scales.log2().round().exp2())
        for weight in drawn(block, constant=constant)
        if weight.scales is not None
    )
    out = q.new_empty(tokens, HEADS, VALUE)
    expand_values_triton(latent, w_uv, out, fp8)
    assert relative_error(out, exact(latent, w_uv, "thc,hvc->thv")) < BOUND
    got = absorb_queries_triton(q, w_uk, fp8)
    assert relative_error(got, exact(q, w_uk, "thd,hdc->thc")) < BOUND


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", BLOCKS)
def test_definition_of_the_static_form(dtype: torch.dtype, block: tuple[int, int]) -> None:
    """Inputs are rounded to the nearest number, half a unit in the last of 3 or 2 bits away at most, and saturate."""
    weight = drawn_weight(HEADS * (NOPE + VALUE), LATENT, block=block)
    w_uk, w_uv = weight.split_heads((NOPE, VALUE))
    q = torch.randn(4, HEADS, NOPE, generator=torch.Generator().manual_seed(1))
    got = absorb_queries_torch(q, w_uk, StaticFP8(dtype, 2**-4))
    error = relative_error(got, exact(q, w_uk, "thd,hdc->thc"))
    most = 2**-4 if dtype == E4M3 else 2**-3
    assert most / 10 < error < most
    largest = torch.finfo(dtype).max
    out = torch.empty(1, HEADS, VALUE)
    expand_values_torch(torch.full((1, HEADS, LATENT), 1e6), w_uv, out, StaticFP8(dtype))
    full = torch.full((1, HEADS, LATENT), min(largest, 1e6))
    assert relative_error(out, exact(full, w_uv, "thc,hvc->thv")) < 1e-5


def test_many_positive_numbers_are_summed_in_float32() -> None:
    """Sums with the 14 bits of a tensor core would lose the last of 512 equal numbers."""
    values = torch.full((1, 128, 512), 1.125, device=DEVICE).to(E4M3)
    weight = Weight(values, torch.ones(1, 1, 4, device=DEVICE), (128, 128))
    latent = torch.full((2, 1, 512), 1.125, dtype=torch.float16, device=DEVICE)
    for fp8 in (None, StaticFP8(E4M3)):
        out = torch.empty(2, 1, 128, dtype=torch.float32, device=DEVICE)
        expand_values_triton(latent, weight, out, fp8)
        assert (out == 512 * 1.125**2).all()


def test_nan_and_infinity_stay_visible() -> None:
    w_uk, _ = drawn((128, 128), constant=True)
    q = rows(3, NOPE).clone()
    q[0, 0, 3], q[1, 1, 5] = float("nan"), float("inf")
    got = absorb_queries_triton(q, w_uk)
    assert got[0, 0].isnan().all() and not got[1, 1].isfinite().any()
    assert got[0, 1:].isfinite().all() and got[2].isfinite().all()


def test_weights_without_a_kernel() -> None:
    """Scales that vary along both axes within a tile, and widths that tiles do not cover."""
    w_uk, w_uv = drawn((128, 128), constant=True)
    assert has_kernel(w_uk, transposed=False) and has_kernel(w_uv, transposed=True)
    w_uk, w_uv = drawn((1, 128), constant=True)
    assert has_kernel(w_uk, transposed=False) and not has_kernel(w_uv, transposed=True)
    for shape in ((2, 96, 256), (2, 128, 192)):
        weight = drawn_weight(*shape, block=(128, 128))
        assert not has_kernel(weight, transposed=False)


def test_weights_that_stay_quantized() -> None:
    """Matrices of DeepSeek's heads, unless activations are to stay as they are."""
    takes = partial(takes_heads, dtype=torch.float32, rows=(128, 128))
    for dtype, block in ((E4M3, (128, 128)), (E4M3, (1, 512)), (torch.int8, (1, 512))):
        weight = drawn_weight(512, 512, dtype=dtype, block=block)
        assert takes(weight)
        assert not takes(weight._replace(weight_only=True))
        assert not takes(weight._replace(values=weight.values.view(torch.uint8)))
    assert not takes(drawn_weight(512, 512, block=(1, 128)))
    assert not takes(drawn_weight(512, 512, block=(128, 64)))
    assert not takes_heads(drawn_weight(384, 512), torch.float32, rows=(64, 128))


def launched(
    found: Limits,
    heads: int,
    tokens: int,
    kind: torch.dtype | None,
    block: tuple[int, int],
    dtype: torch.dtype = E4M3,
) -> None:
    """Launches both products, that of W_UK with the rotation, for V2-Lite's 16 heads or V3's 128."""
    fp8 = None if kind is None else StaticFP8(kind)
    with compiling_for(found), torch.device("meta"):
        w_uk, w_uv = meta_weight(heads, block, dtype).split_heads((128, 128))
        joined = torch.empty(tokens, heads * 192 + 576, dtype=torch.bfloat16)
        latent, out = joined.new_empty(tokens, heads, 512), joined[:, : heads * 128]
        expand_values_triton(latent, w_uv, out.view(tokens, heads, 128), fp8)
        q, kv = torch.split(joined, [heads * 192, 576], dim=-1)
        rope_absorb_triton(
            q.view(tokens, heads, 192),
            kv,
            torch.empty(512, dtype=torch.bfloat16),
            1e-6,
            torch.empty(tokens, 32, dtype=torch.complex64),
            torch.empty(9, 64, 576, dtype=torch.bfloat16),
            torch.empty(tokens, dtype=torch.int64),
            w_uk,
            interleaved=True,
            fp8=fp8,
        )


def meta_weight(heads: int, block: tuple[int, int], dtype: torch.dtype) -> Weight:
    scales = torch.empty(heads * 256 // block[0], 512 // block[1], dtype=torch.float32)
    return Weight(torch.empty(heads * 256, 512, dtype=dtype), scales, block, constant=True)


def launches() -> None:
    launched(H200, 16, 32, None, (128, 128))
    launched(H200, 128, 32, E4M3, (128, 128))
    launched(A100, 16, 32, None, (1, 512), torch.int8)  # without a conversion from E4M3
    launched(B200, 16, 256, None, (128, 128))


def all_launches() -> None:
    for found in (H200, L40S, B200):
        for case in product((16, 128), (1, 32, 256), (None, E4M3, E5M2), BLOCKS_OF_MODELS):
            launched(found, *case)
    for case in product((16, 128), (1, 32, 256), (None,), ((1, 512),), (torch.int8,)):
        launched(A100, *case)


def test_compiled() -> None:
    check(launches, {80, 90, 100})


@pytest.mark.slow
def test_all_compiled() -> None:
    check(all_launches, {80, 89, 90, 100})


def check(launched: Callable[[], None], architectures: set[int]) -> None:
    reports = compile_sm90(launched)
    assert {report.architecture for report in reports} == architectures
    for report in reports:
        assert report.spill_bytes == 0, report
        assert report.shared_bytes <= LIMITS[report.architecture].shared_bytes, report
        report.check_order()
