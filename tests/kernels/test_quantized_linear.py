"""Products with quantized weights against float64, in the interpreter, and compiled for sm_90 at the sizes of V2-Lite
and V3."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels import quantized_few_rows as few_rows
from mla_router.worker.kernels import quantized_linear
from mla_router.worker.kernels.hopper_ring import padded_rows
from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.quantize import quantize_rows_torch, quantize_rows_triton
from mla_router.worker.kernels.quantized_gemv import norm_gemv_triton, quantized_gemv_triton
from mla_router.worker.kernels.quantized_linear import Tiles, quantized_linear_triton
from mla_router.worker.kernels.quantized_linear_hopper import (
    Tiling,
    quantized_linear_hopper,
    splits,
    tiling,
)
from mla_router.worker.kernels.rms_norm import add_rms_norm_torch, rms_norm_torch
from support.quantized import drawn_weight, numbers, relative_error, rounded
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Blocks, cut-off blocks, a scale a row, and a scale for each 128 numbers of a row
WEIGHTS = [(200, 256, (128, 128)), (37, 304, (128, 128)), (48, 256, (1, 256)), (40, 384, (1, 128))]
TILES = [Tiles(16, 32, 128), Tiles(32, 16, 64, group_m=2)]


def rows(count: int, inputs: int) -> torch.Tensor:
    """float16: the interpreter does not multiply bfloat16."""
    draw = torch.Generator().manual_seed(count)
    return torch.randn(count, inputs + 8, generator=draw).to(DEVICE, torch.float16)[:, :inputs]


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize(("outputs", "inputs", "block"), WEIGHTS)
def test_one_row_is_not_quantized(
    outputs: int, inputs: int, block: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = drawn_weight(outputs, inputs, dtype=dtype, block=block, device=DEVICE)
    x = rows(1, inputs)
    got = quantized_gemv_triton(x, weight, out_dtype=torch.float32, tiles=(8, 2, 4))
    assert relative_error(got, x.double() @ numbers(weight).T) < 1e-5


@pytest.mark.parametrize("tiles", [few_rows.Tiles(16, 2, 0), few_rows.Tiles(32, 1, 2)])
@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize(("outputs", "inputs", "block"), WEIGHTS)
def test_few_rows_lose_nothing_but_tiny_numbers(
    outputs: int, inputs: int, block: tuple[int, int], dtype: torch.dtype, tiles: few_rows.Tiles
) -> None:
    weight = drawn_weight(outputs, inputs, dtype=dtype, block=block, device=DEVICE)
    x = rows(5, inputs)
    x[1, :128] *= 1e-3
    x[2] = 0
    got = few_rows.few_rows_quantized(x, weight, out_dtype=torch.float32, tiles=tiles)
    assert relative_error(got, x.double() @ numbers(weight).T) < 1e-4
    assert not got[2].any()


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize(("outputs", "inputs", "block"), WEIGHTS)
def test_product_of_quantized_rows_is_exact(
    outputs: int, inputs: int, block: tuple[int, int], dtype: torch.dtype, tiles: Tiles
) -> None:
    """Up to the rounding of sums in float32."""
    weight = drawn_weight(outputs, inputs, dtype=dtype, block=block, device=DEVICE)
    x = quantize_rows_torch(rows(37, inputs), dtype)
    got = quantized_linear_triton(x, weight, out_dtype=torch.float32, tiles=tiles)
    expected = rounded(rows(37, inputs), dtype) @ numbers(weight).T
    assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize(("outputs", "inputs", "block"), WEIGHTS)
def test_cpu_multiplies_the_numbers_of_the_kernels(
    outputs: int, inputs: int, block: tuple[int, int], dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """Rows of so few inputs as they are: one of FP8, up to 16 of INT8. More are quantized. The result alone is rounded to
    bfloat16."""
    weight = drawn_weight(outputs, inputs, dtype=dtype, block=block)
    limit = 1e-5 if out_dtype == torch.float32 else 3e-3
    kept_rows = 1 if dtype == FP8 else 16
    for count in (1, 2, 16, 17, 200):
        x = torch.randn(count, inputs).bfloat16()
        exact = x.double() @ numbers(weight).T
        kept = linear(x, weight._replace(weight_only=True), out_dtype=out_dtype)
        assert relative_error(kept, exact) < limit, count
        operand = x.double() if count <= kept_rows else rounded(x, dtype)
        got = linear(x, weight, out_dtype=out_dtype)
        assert got.dtype == out_dtype
        assert relative_error(got, operand @ numbers(weight).T) < limit, count
        assert count <= kept_rows or relative_error(got, exact) > 4e-3, "not quantized"


def test_cpu_quantizes_from_fewer_rows_on_if_inputs_are_many() -> None:
    weight = drawn_weight(48, 3200, dtype=INT8, block=(1, 3200))
    for count in (8, 9):
        x = torch.randn(count, 3200)
        operand = x.double() if count == 8 else rounded(x, INT8)
        assert relative_error(linear(x, weight), operand @ numbers(weight).T) < 1e-5, count


@pytest.mark.parametrize(("inputs", "columns"), [(256, 64), (250, 128)])
def test_cpu_quantizes_nothing_for_which_a_gpu_has_no_kernel(inputs: int, columns: int) -> None:
    weight = drawn_weight(48, inputs, block=(128, columns))
    x = torch.randn(40, inputs)
    assert relative_error(linear(x, weight), x.double() @ numbers(weight).T) < 1e-5


def launches() -> None:
    """Every number of rows at which tiles change."""
    quantized_linear.LIBRARY_ROWS = ((0, 1 << 30),)
    for outputs, inputs, dtype, counts in (
        (3648, 2048, FP8, (1, 2, 16, 32, 64, 128, 256)),
        (2048, 2816, FP8, (2, 16)),
        (2112, 7168, FP8, (2, 32)),
        (7168, 16384, FP8, (1, 2, 64)),
        (5632, 2048, INT8, (1, 2, 16, 64)),
    ):
        weight = drawn_meta(outputs, inputs, dtype)
        for count in counts:
            x = torch.empty(count, inputs, dtype=torch.bfloat16, device="meta")
            if count == 1 and inputs <= 4096:
                norm_gemv_triton(x, x, x[0], 1e-6, weight, out_dtype=x.dtype)
            if count == 1:
                quantized_gemv_triton(x, weight, out_dtype=x.dtype)
            elif few_rows.is_few(count, inputs):
                few_rows.few_rows_quantized(x, weight, out_dtype=x.dtype)
            else:
                q = quantize_rows_triton(x, dtype)
                tiles = quantized_linear.tiling(count, outputs)
                quantized_linear_triton(q, weight, out_dtype=x.dtype, tiles=tiles)


def hopper_launches() -> None:
    """Each number of rows in a tile, with each split, and fewer groups of inputs than tiles of the ring."""
    for count, outputs, inputs in (
        (5, 3648, 2048),
        (9, 2112, 7168),
        (32, 576, 1040),
        (64, 2048, 2816),
        (100, 3648, 2048),
    ):
        x = torch.empty(count, inputs, dtype=torch.bfloat16, device="meta")
        q = quantize_rows_triton(x, FP8)
        weight = drawn_meta(outputs, inputs, FP8)
        tile = padded_rows(count)
        for split in splits(tile):
            quantized_linear_hopper(q, weight, out_dtype=x.dtype, tiles=Tiling(tile, split))


def drawn_meta(outputs: int, inputs: int, dtype: torch.dtype) -> quantized_linear.Weight:
    block = (128, 128) if dtype == FP8 else (1, inputs)
    return quantized_linear.Weight(
        torch.empty(outputs, inputs, dtype=dtype, device="meta"),
        torch.empty(-(-outputs // block[0]), -(-inputs // block[1]), device="meta"),
        block,
        constant=True,
    )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
        assert report.shared_bytes <= 114_688, report  # `quantize.SHARED_BYTES`


def test_ring_of_tiles_compiled_for_sm_90() -> None:
    for report in compile_sm90(hopper_launches):
        report.check()
        if report.kernel != "_quantize_kernel":
            assert report.has_wgmma, report
            # The weight by the warp that copies, its scales by those that multiply
            assert report.reads_early == ["weight", "weight_scales"], report


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tiles"),
    [
        (8, 2048, 2048, Tiling(8, 1)),
        (8, 2112, 7168, Tiling(8, 2)),
        (32, 2112, 7168, Tiling(32, 2)),
        (65, 2112, 7168, Tiling(32, 1)),
        (128, 2048, 2816, Tiling(32, 1)),
        (100, 3648, 2048, Tiling(64, 1)),
        (128, 5632, 2048, Tiling(128, 1)),
        (256, 2048, 2816, Tiling(64, 1)),
        (256, 3648, 2048, Tiling(128, 1)),
        (16, 24576, 1536, Tiling(16, 1)),
    ],
)
def test_rings_on_132_multiprocessors(rows: int, outputs: int, inputs: int, tiles: Tiling) -> None:
    """As many programs as multiprocessors at most, unless the outputs alone are more."""
    assert tiling(rows, outputs, inputs, 132) == tiles


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(("outputs", "inputs", "block"), WEIGHTS)
def test_norm_of_one_row(outputs: int, inputs: int, block: tuple[int, int], added: bool) -> None:
    weight = drawn_weight(outputs, inputs, block=block, device=DEVICE)
    x, residual = rows(1, inputs), rows(2, inputs)[1:] if added else None
    norm_weight = rows(3, inputs)[2]
    got, total = norm_gemv_triton(x, residual, norm_weight, 1e-6, weight, out_dtype=torch.float32)
    if residual is None:
        normed, expected = rms_norm_torch(x, norm_weight, 1e-6), x
    else:
        normed, expected = add_rms_norm_torch(x, residual, norm_weight, 1e-6)
    assert torch.equal(total, expected)
    assert relative_error(got, normed.double() @ numbers(weight).T) < 1e-4
