"""Experts with quantized weights against each token through each of its experts in float64: interpreted, and compiled
for sm_90."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.moe.combine import Term
from mla_router.worker.kernels.moe.experts import moe_experts
from mla_router.worker.kernels.moe.quantized_experts import (
    HopperRows,
    hopper_rows,
    quantized_experts,
    quantized_tiling,
)
from mla_router.worker.kernels.moe.shared import SharedWeights
from mla_router.worker.kernels.moe.tiling import MoeTiling, Tile
from mla_router.worker.kernels.weight import Weight
from support.corners import corners
from support.quantized import drawn_weight, numbers, relative_error, rounded
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

FP8, INT8 = torch.float8_e4m3fn, torch.int8
HIDDEN, WIDTH, EXPERTS, TOP_K = 256, 144, 5, 3
PAIRS = MoeTiling(1, gate_up=Tile(8, 256), down=Tile(32, 128))
FEW = MoeTiling(16, gate_up=Tile(64, 128, 2), down=Tile(32, 64, 3))
MANY = MoeTiling(64, gate_up=Tile(128, 64, 2), down=Tile(64, 128))


def in_float64(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(len(x)):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert] @ (gate / (1 + (-gate).exp()) * up))
    return out


@pytest.mark.parametrize(
    ("case", "by_row"),
    corners(
        [
            (1, PAIRS, FP8, 2e-3),
            (1, PAIRS, INT8, 2e-3),
            (3, PAIRS, FP8, 2e-3),
            (7, FEW, INT8, 0.02),
            (40, FEW, INT8, 0.02),
            (70, MANY, INT8, 0.02),
        ],
        [False, True],
    ),
)
def test_experts(case: tuple[int, MoeTiling, torch.dtype, float], by_row: bool) -> None:
    """Rows of pairs are not quantized. The other kernels quantize with INT8 alone here: the interpreter's conversion to
    FP8 loses carries (`tests/gpu` has both)."""
    tokens, tiling, dtype, limit = case
    draw = torch.Generator().manual_seed(tokens)
    x = (torch.randn(tokens, HIDDEN, generator=draw) * 8).to(DEVICE, torch.float16)
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(tokens)])
    weights = torch.rand(tokens, TOP_K, generator=draw).to(DEVICE)
    plus = (torch.randn(tokens, HIDDEN, generator=draw) * 0.1).to(DEVICE, torch.float16)
    gate_up = drawn_weight(
        EXPERTS,
        2 * WIDTH,
        HIDDEN,
        dtype=dtype,
        block=(1, HIDDEN) if by_row else (16, 128),
        device=DEVICE,
    )
    down = drawn_weight(
        EXPERTS,
        HIDDEN,
        WIDTH,
        dtype=dtype,
        block=(1, WIDTH) if by_row else (128, 128),
        device=DEVICE,
    )
    ids = ids.int().to(DEVICE)
    got = quantized_experts(x, gate_up, down, weights, ids, lambda: Term(plus), tiling=tiling)
    expected = in_float64(x, numbers(gate_up), numbers(down), weights, ids)
    assert relative_error(got, expected + plus) < limit


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_pairs_without_an_expert_read_no_weights(dtype: torch.dtype) -> None:
    """The scales of all experts that no pair has are NaN, and expert 0 is one of them."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(1, HIDDEN, generator=draw).to(DEVICE, torch.float16)
    ids = torch.tensor([[-1, 2, -1]], dtype=torch.int32, device=DEVICE)
    weights = torch.tensor([[0.0, 0.7, 0.0]], device=DEVICE)
    gate_up = drawn_weight(EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype, block=(16, 128), device=DEVICE)
    down = drawn_weight(EXPERTS, HIDDEN, WIDTH, dtype=dtype, device=DEVICE)
    expected = in_float64(x, numbers(gate_up), numbers(down), weights[:, 1:2], ids[:, 1:2])
    for weight in (gate_up, down):
        assert weight.scales is not None
        weight.scales[[0, 1, 3, 4]] = float("nan")
    got = quantized_experts(x, gate_up, down, weights, ids, tiling=PAIRS)
    assert relative_error(got, expected) < 2e-3


@pytest.mark.parametrize(
    ("tokens", "width", "group", "dtype"),
    [
        *(
            (*case, dtype)
            for case in ((1, 144, None), (7, 144, 128), (70, 144, 64))
            for dtype in (FP8, INT8)
        ),
        (140, 256, 128, FP8),  # Hopper's kernels for prompts
    ],
)
def test_cpu_multiplies_the_numbers_of_the_kernels(
    tokens: int, width: int, group: int | None, dtype: torch.dtype
) -> None:
    """One token is not quantized. The activations of more tokens are, and the results of gate and up as well, in groups of
    the kernel's tiles."""
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=draw) * 8
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(tokens)])
    ids[0, 1] = -1
    weights = torch.rand(tokens, TOP_K, generator=draw).masked_fill_(ids < 0, 0)
    block = (128, 128) if width % 128 == 0 else (16, 128)
    gate_up = drawn_weight(EXPERTS, 2 * width, HIDDEN, dtype=dtype, block=block)
    down = drawn_weight(EXPERTS, HIDDEN, width, dtype=dtype)

    def expected(gate_up: Weight, down: Weight, group: int | None) -> Tensor:
        """`in_float64`, with rows rounded in the groups of the kernels."""
        rows = x.double() if group is None else rounded(x, dtype)
        ups, downs = numbers(gate_up), numbers(down)
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(tokens):
            for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
                gate, up = (ups[expert] @ rows[token]).chunk(2)
                gated = (gate / (1 + (-gate).exp()) * up)[None]
                operand = gated if group is None else rounded(gated.float(), dtype, group)
                out[token] += weight * (downs[expert] @ operand[0])
        return out

    got = moe_experts(x, gate_up, down, weights, ids.int())
    assert relative_error(got, expected(gate_up, down, group)) < 1e-3
    assert group is None or relative_error(got, expected(gate_up, down, None)) > 4e-3
    unrounded = [weight._replace(weight_only=True) for weight in (gate_up, down)]
    kept = moe_experts(x, *unrounded, weights, ids.int())
    assert relative_error(kept, expected(gate_up, down, None)) < 1e-5


def test_more_experts_of_other_ranks_have_fewer_rows() -> None:
    """The numbers of rows that decide are those of an expert, whichever rank has it. Few tokens rarely share experts."""
    assert [quantized_tiling(3, 8, experts).rows for experts in (256, 48, 47, 8)] == [1, 1, 16, 16]
    tiles = [quantized_tiling(128, 8, experts, HopperRows(0, 0, 80)) for experts in (256, 32, 8)]
    assert [tiling.rows for tiling in tiles] == [16, 64, 128]
    tilings = [quantized_tiling(1000, 8, experts, HopperRows(0, 0, 80)) for experts in (49, 50)]
    assert [tiling.down.skips_padding for tiling in tilings] == [False, True]  # 163, 160 rows
    draw = torch.Generator().manual_seed(2)
    gate_up = drawn_weight(2, 512, HIDDEN, block=(128, 128))
    down = drawn_weight(2, HIDDEN, 256)
    x = torch.randn(100, HIDDEN, generator=draw)
    ids, weights = torch.tensor([[0, 1]] * 100).int(), torch.rand(100, 2, generator=draw)
    alone, shared = (moe_experts(x, gate_up, down, weights, ids, total=total) for total in (2, 4))
    # In groups of 128 and of 64 columns
    assert 1e-4 < relative_error(alone, shared.double()) < 0.1


def launches() -> None:
    v2_lite, v3 = (64, 2048, 1408, 6), (256, 7168, 2048, 8)
    for (experts, hidden, width, top_k), dtype, counts in (
        (v2_lite, FP8, (1, 8, 200, 512, 4096)),
        (v2_lite, INT8, (1, 17)),
        (v3, FP8, (1, 17, 256, 4096)),  # 128 tokens an expert, so that blocks are skipped
    ):
        gate_up = meta_weight(experts, 2 * width, hidden, dtype)
        down = meta_weight(experts, hidden, width, dtype)
        for tokens in counts:
            x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
            weights = torch.empty(tokens, top_k, device="meta")
            ids = weights.to(torch.int32)
            tiling = quantized_tiling(tokens, top_k, experts, hopper_rows(gate_up, down))
            quantized_experts(x, gate_up, down, weights, ids, tiling=tiling)


def meta_weight(experts: int, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
    block = (128, 128) if dtype == FP8 else (1, inputs)
    return Weight(
        torch.empty(experts, outputs, inputs, dtype=dtype, device="meta"),
        torch.empty(experts, -(-outputs // block[0]), -(-inputs // block[1]), device="meta"),
        block,
        constant=True,
    )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        if report.kernel != "_place":
            report.check()


def test_shared_experts_of_one_token() -> None:
    """Two shared experts, joined to one layer with all gates first, in the kernels of the routed experts."""
    draw = torch.Generator().manual_seed(3)
    x = (torch.randn(1, HIDDEN, generator=draw) * 8).to(DEVICE, torch.float16)
    ids = torch.randperm(EXPERTS, generator=draw)[None, :TOP_K].int().to(DEVICE)
    weights = torch.rand(1, TOP_K, generator=draw).to(DEVICE)
    gate_up = drawn_weight(EXPERTS, 2 * WIDTH, HIDDEN, block=(16, 128), device=DEVICE)
    down = drawn_weight(EXPERTS, HIDDEN, WIDTH, device=DEVICE)
    shared = SharedWeights(
        drawn_weight(4 * WIDTH, HIDDEN, block=(16, 128), device=DEVICE, seed=1),
        drawn_weight(HIDDEN, 2 * WIDTH, device=DEVICE, seed=2),
    )
    got = quantized_experts(x, gate_up, down, weights, ids, shared=shared, tiling=PAIRS)
    gate, up = (numbers(shared.gate_up) @ x[0].double()).chunk(2)
    expected = in_float64(x, numbers(gate_up), numbers(down), weights, ids)
    expected += numbers(shared.down) @ (gate / (1 + (-gate).exp()) * up)
    assert relative_error(got, expected) < 2e-3
