"""Products with quantized weights on a GPU: real shapes in bfloat16, against float64 and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.hopper_ring import padded_rows
from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.moe.combine import Term
from mla_router.worker.kernels.moe.experts import moe_experts
from mla_router.worker.kernels.moe.quantized_experts import quantized_experts
from mla_router.worker.kernels.moe.quantized_gemm_hopper import NUM_WARPS, ROWS
from mla_router.worker.kernels.moe.routing import RoutingRule, moe_routing
from mla_router.worker.kernels.moe.tiling import MoeTiling, Tile
from mla_router.worker.kernels.quantize import (
    in_form,
    quantize_rows,
    quantize_rows_torch,
)
from mla_router.worker.kernels.quantized_linear import row_form
from mla_router.worker.kernels.quantized_linear_hopper import (
    Tiling,
    in_ring,
    quantized_linear_hopper,
    splits,
)
from mla_router.worker.kernels.silu_and_mul import gated_rows, silu_and_mul
from mla_router.worker.kernels.weight import PLAIN_ROWS, RowForm, Weight
from support.cuda import captured, forbid_waiting
from support.quantized import drawn_weight, numbers, relative_error, rounded

pytestmark = pytest.mark.gpu

FP8, INT8 = torch.float8_e4m3fn, torch.int8
EXPERTS, TOP_K, HIDDEN, WIDTH = 64, 6, 2048, 1408  # V2-Lite's
# bfloat16's rounding of the result, and the rounding of activations to 3 or 7 bits
EXACT, ROUNDED = 3e-3, {FP8: 0.03, INT8: 0.012}


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 2048), (64, 2816), (301, 576), (5, 16384)])
def test_quantizer_is_bit_equal_to_its_twin(tokens: int, columns: int, dtype: torch.dtype) -> None:
    draw = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=draw, device="cuda").bfloat16()
    x[0, :128], x[0, 130] = 0, 3e38
    if dtype == FP8:
        x[-1, -1] = torch.nan
    got, expected = quantize_rows(x, dtype), quantize_rows_torch(x.cpu(), dtype)
    assert torch.equal(got.scales.cpu(), expected.scales)
    assert torch.equal(got.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 17, 33, 64, 100, 128, 191, 301, 1024])
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "block"),
    [
        (3648, 2048, FP8, (128, 128)),
        (2048, 2816, FP8, (128, 128)),
        (7168, 16384, FP8, (128, 128)),
        (21888, 2048, FP8, (64, 128)),
        (2048, 1024, FP8, (1, 128)),
        (5632, 2048, FP8, (1, 2048)),
        (2112, 7168, INT8, (1, 7168)),
    ],
)
def test_linear(
    outputs: int, inputs: int, dtype: torch.dtype, block: tuple[int, int], tokens: int
) -> None:
    weight = drawn_weight(outputs, inputs, dtype=dtype, block=block, device="cuda")
    draw = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, inputs, generator=draw, device="cuda").bfloat16()
    with forbid_waiting():
        got = linear(x, weight)
    error = relative_error(got, x.double() @ numbers(weight).T)
    is_exact = tokens <= 8 and not in_ring(weight, tokens)
    assert got.dtype == x.dtype and error < (EXACT if is_exact else ROUNDED[dtype]), error


@pytest.mark.parametrize("tokens", [2, 9, 17, 40, 64, 65, 66, 128, 193, 301])
@pytest.mark.parametrize(
    ("outputs", "inputs", "block"),
    [(3648, 2048, (128, 128)), (7168, 16384, (128, 128)), (5632, 2048, (1, 2048))],
)
def test_product_of_rows_in_its_form(
    outputs: int, inputs: int, block: tuple[int, int], tokens: int
) -> None:
    """The kernel before it has quantized them; the result is the same."""
    weight = drawn_weight(outputs, inputs, block=block, device="cuda")
    gate_up = torch.randn(tokens, 2 * inputs, device="cuda").bfloat16()
    form = row_form(gate_up, weight)
    assert form != PLAIN_ROWS or tokens <= 16
    with forbid_waiting():
        got = linear(gated_rows(gate_up, form), weight)
    assert torch.equal(got, linear(silu_and_mul(gate_up), weight))


@pytest.mark.parametrize("tokens", [2, 7, 12, 32, 33, 64, 65, 128, 250])
@pytest.mark.parametrize(
    ("outputs", "inputs", "block"),
    [
        (3648, 2048, (128, 128)),
        (1000, 1040, (128, 128)),
        (2048, 2816, (128, 128)),
        (2112, 7168, (64, 128)),
        (576, 1168, (1, 1168)),
    ],
)
def test_ring_of_tiles(outputs: int, inputs: int, block: tuple[int, int], tokens: int) -> None:
    """Each tile of rows and split of the inputs, with a ring that is filled once and one that is filled several times."""
    weight = drawn_weight(outputs, inputs, block=block, device="cuda")
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    rows = quantize_rows(x, FP8)
    expected = rounded(x, FP8) @ numbers(weight).T
    for rows_of_tile in {8, 32, min(padded_rows(tokens), 128)}:
        for split in splits(rows_of_tile):
            tiles = Tiling(rows_of_tile, split)
            for stages in (2, 8):
                got = quantized_linear_hopper(
                    rows, weight, out_dtype=torch.float32, tiles=tiles, stages=stages
                )
                assert relative_error(got, expected) < EXACT, (tiles, stages)


def on_cpu(weight: Weight) -> Weight:
    assert weight.scales is not None
    return weight._replace(values=weight.values.cpu(), scales=weight.scales.cpu())


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 17, 64, 301])
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "block"),
    [
        (3648, 2048, FP8, (128, 128)),
        (1024, 7168, FP8, (128, 128)),
        (2048, 2816, FP8, (1, 2816)),
        (1024, 2048, INT8, (1, 2048)),
    ],
)
def test_linear_is_its_twin_on_a_cpu(
    outputs: int, inputs: int, dtype: torch.dtype, block: tuple[int, int], tokens: int
) -> None:
    """Both round the same activations. They differ only by the rounding of the result to bfloat16."""
    weight = drawn_weight(outputs, inputs, dtype=dtype, block=block, device="cuda")
    draw = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, inputs, generator=draw, device="cuda").bfloat16()
    expected = linear(x.cpu(), on_cpu(weight), out_dtype=torch.float32)
    assert relative_error(linear(x, weight).cpu(), expected.double()) < EXACT


@pytest.mark.parametrize("tokens", [1, 8, 64, 304])
def test_long_sums_of_one_sign(tokens: int) -> None:
    """The tensor cores' own sums of FP8 have 14 bits: a product that adds all of them there is off by percents."""
    weight = drawn_weight(512, 16384, device="cuda")
    weight = weight._replace(values=weight.values.float().abs().to(FP8))
    x = torch.ones(tokens, 16384, device="cuda", dtype=torch.bfloat16)
    assert relative_error(linear(x, weight), x.double() @ numbers(weight).T) < EXACT


def experts(dtype: torch.dtype, block: tuple[int, int] | None) -> tuple[Weight, Weight]:
    return (
        drawn_weight(
            EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype, block=block or (1, HIDDEN), device="cuda"
        ),
        drawn_weight(EXPERTS, HIDDEN, WIDTH, dtype=dtype, block=block or (1, WIDTH), device="cuda"),
    )


def in_float64(x: Tensor, gate_up: Weight, down: Weight, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(EXPERTS):
        token, k = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ numbers(gate_up.expert(expert)).T).chunk(2, dim=-1)
        row = (torch.nn.functional.silu(gate) * up) @ numbers(down.expert(expert)).T
        out.index_add_(0, token, row * weights[token, k].double()[:, None])
    return out


@pytest.mark.parametrize(
    ("dtype", "block"), [(FP8, (128, 128)), (FP8, None), (INT8, None)], ids=["block", "row", "int8"]
)
def test_experts(dtype: torch.dtype, block: tuple[int, int] | None) -> None:
    gate_up, down = experts(dtype, block)
    draw = torch.Generator("cuda").manual_seed(0)
    for tokens in (1, 2, 3, 16, 17, 100, 128, 129, 1000, 4097):
        x = torch.randn(tokens, HIDDEN, generator=draw, device="cuda").bfloat16()
        logits = torch.randn(tokens, EXPERTS, generator=draw, device="cuda")
        weights, ids = moe_routing(logits, RoutingRule(TOP_K, "softmax"))
        plus = torch.randn(tokens, HIDDEN, generator=draw, device="cuda").bfloat16()
        with forbid_waiting():
            got = moe_experts(x, gate_up, down, weights, ids, lambda plus=plus: Term(plus))  # type: ignore[misc]
        expected = in_float64(x, gate_up, down, weights, ids) + plus
        error = relative_error(got, expected)
        # Two roundings of activations from two tokens on
        assert error < (2 * EXACT if tokens == 1 else 2 * ROUNDED[dtype]), (tokens, error)


@pytest.mark.parametrize(("dtype", "block"), [(FP8, (128, 128)), (INT8, None)])
@pytest.mark.parametrize("tokens", [1, 8, 200, 900])
def test_experts_are_their_twins_on_a_cpu(
    dtype: torch.dtype, block: tuple[int, int] | None, tokens: int
) -> None:
    gate_up, down = experts(dtype, block)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    logits = torch.randn(tokens, EXPERTS, device="cuda")
    weights, ids = moe_routing(logits, RoutingRule(TOP_K, "softmax"))
    got = moe_experts(x, gate_up, down, weights, ids)
    expected = moe_experts(x.cpu(), on_cpu(gate_up), on_cpu(down), weights.cpu(), ids.cpu())
    # Sums in another order round a few results of gate and up to the neighbour
    assert relative_error(got.cpu(), expected.double()) < 2 * EXACT


@pytest.mark.parametrize("tokens", [2, 4, 17, 128, 301, 1200])
def test_experts_take_quantized_rows(tokens: int) -> None:
    """From four tokens on both are the same: fewer tokens stream the weights, and then rows that come plain stay so."""
    gate_up, down = experts(FP8, (128, 128))
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    logits = torch.randn(tokens, EXPERTS, device="cuda")
    weights, ids = moe_routing(logits, RoutingRule(TOP_K, "softmax"))
    rows = in_form(x, RowForm(plain=False, quantized=FP8))
    got = moe_experts(rows, gate_up, down, weights, ids)
    expected = moe_experts(x, gate_up, down, weights, ids)
    if tokens < 4:
        assert relative_error(got, expected.double()) < 2 * ROUNDED[FP8]
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("tokens", [2, 17, 128])
def test_few_rows_of_an_expert(tokens: int, rows: int) -> None:
    """The kernels of Hopper and Triton's multiply the same numbers."""
    gate_up, down = experts(FP8, (128, 128))
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    logits = torch.randn(tokens, EXPERTS, device="cuda")
    weights, ids = moe_routing(logits, RoutingRule(TOP_K, "softmax"))
    of_hopper = MoeTiling(rows, Tile(128, 128, 1, NUM_WARPS), Tile(64, 128, 1, NUM_WARPS))
    of_triton = MoeTiling(rows, Tile(128, 128, 8, 4, 3), Tile(64, 128, 2, 4, 6))
    got, expected = (
        quantized_experts(x, gate_up, down, weights, ids, tiling=tiling)
        for tiling in (of_hopper, of_triton)
    )
    assert relative_error(got, expected.double()) < EXACT


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("tokens", [2, 40, 200, 900])
def test_padding_of_blocks_of_many_rows(tokens: int, skips: bool) -> None:
    """Rows of Hopper's blocks that no token has, up to whole halves, change no result."""
    gate_up, down = experts(FP8, (128, 128))
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    logits = torch.randn(tokens, EXPERTS, device="cuda")
    weights, ids = moe_routing(logits, RoutingRule(TOP_K, "softmax"))
    down_tile = Tile(256, 128, 8, NUM_WARPS, 4, skips)
    tiling = MoeTiling(ROWS, Tile(128, 128, 16, NUM_WARPS, 4, skips), down_tile)
    got = quantized_experts(x, gate_up, down, weights, ids, tiling=tiling)
    expected = in_float64(x, gate_up, down, weights, ids)
    assert relative_error(got, expected) < 2 * ROUNDED[FP8]


def test_idle_rows_have_no_expert() -> None:
    gate_up, down = experts(FP8, (128, 128))
    x = torch.randn(8, HIDDEN, device="cuda").bfloat16()
    weights = torch.rand(8, TOP_K, device="cuda")
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(8)]).int().cuda()
    ids[5:], weights[5:] = -1, 0
    got = moe_experts(x, gate_up, down, weights, ids)
    assert not got[5:].any()
    assert relative_error(got, in_float64(x, gate_up, down, weights, ids)) < 2 * ROUNDED[FP8]


@pytest.mark.parametrize("present", [0, 1, 40])
def test_a_prompt_with_experts_of_other_ranks(present: int) -> None:
    """Programs without a tile, and blocks that are mostly padding."""
    gate_up, down = experts(FP8, (128, 128))
    x = torch.randn(2000, HIDDEN, device="cuda").bfloat16()
    logits = torch.randn(2000, EXPERTS, device="cuda")
    weights, ids = moe_routing(logits, RoutingRule(TOP_K, "softmax"))
    ids = torch.where(ids < present, ids, -1)
    weights = weights.masked_fill(ids < 0, 0)
    got = moe_experts(x, gate_up, down, weights, ids)
    if not present:
        assert not got.any()
    else:
        expected = in_float64(x, gate_up, down, weights, ids)
        assert relative_error(got, expected) < 2 * ROUNDED[FP8]


@pytest.mark.parametrize("tokens", [1, 8, 32, 300, 1000])
def test_in_a_graph(tokens: int) -> None:
    gate_up, down = experts(FP8, (128, 128))
    dense = drawn_weight(HIDDEN, HIDDEN, device="cuda")
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    logits = torch.randn(tokens, EXPERTS, device="cuda")
    weights, ids = moe_routing(logits, RoutingRule(TOP_K, "softmax"))

    def layer() -> Tensor:
        return moe_experts(linear(x, dense), gate_up, down, weights, ids)

    expected = layer()
    replay, got = captured(layer)
    replay()
    assert torch.equal(got, expected)
