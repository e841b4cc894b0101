"""The routed experts with quantized weights.

One to three tokens stream the weights of their experts (`quantized_gemv.py`). More tokens are quantized and sorted by
expert for grouped products (`quantized_gemm.py`, and on Hopper `quantized_few_hopper.py` and `quantized_gemm_hopper.py`).
`quantized_experts_torch` multiplies the same numbers on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mla_router.worker.kernels.dispatch import is_hopper
from mla_router.worker.kernels.moe.align import Blocks, blocks_for, moe_align
from mla_router.worker.kernels.moe.combine import Term, combine, weighted_sum
from mla_router.worker.kernels.moe.quantized_few_hopper import down_few, gate_up_few
from mla_router.worker.kernels.moe.quantized_gemm import down_quantized, gate_up_quantized
from mla_router.worker.kernels.moe.quantized_gemm_hopper import (
    NUM_WARPS,
    ROWS,
    down_hopper,
    gate_up_hopper,
    has_whole_tiles,
)
from mla_router.worker.kernels.moe.quantized_gemv import (
    down_pairs_quantized,
    gate_up_pairs_quantized,
)
from mla_router.worker.kernels.moe.shared import SharedWeights
from mla_router.worker.kernels.moe.tiling import MoeTiling, Tile, tuned_tiling
from mla_router.worker.kernels.quantize import (
    GROUP,
    as_quantized,
    has_kernel,
    has_whole_groups,
    round_rows,
)
from mla_router.worker.kernels.silu_and_mul import silu_and_mul_torch
from mla_router.worker.kernels.tuned import device_name, kind_of
from mla_router.worker.kernels.weight import (
    PLAIN_ROWS,
    Activations,
    Quantized,
    RowForm,
    Weight,
    dense_rows,
)

FirstProduct = Callable[[Quantized, Weight, Blocks, Tile], Quantized]
SecondProduct = Callable[[Quantized, Weight, Blocks, Tile], Tensor]

MAX_SHARED_INPUTS = 4096
# Each pair of up to this many tokens streams its weights, if the model has this many experts for each token or more:
# then tokens rarely share experts
MAX_PAIRED_TOKENS, EXPERTS_OF_PAIRS = 3, 16
WIDE_INPUTS = 4096


def takes(x: Activations, gate_up: Weight, down: Weight) -> bool:
    """Whether the kernels of `quantized_experts` serve the products."""
    has_kernels = has_kernel(x, gate_up) and has_kernel(x, down)
    return has_kernels and (x.shape[0] == 1 or not (gate_up.weight_only or down.weight_only))


def row_form(x: Tensor, gate_up: Weight, down: Weight, *, total: int | None = None) -> RowForm:
    """Returns the form in which `moe_experts` takes as many rows as x [T, ...] has, of its dtype."""
    if not len(x) or gate_up.values.shape[2] < GROUP or not takes(x, gate_up, down):
        return PLAIN_ROWS
    if _tiling(x, gate_up, down, top_k=1, total=total).rows == 1:
        return PLAIN_ROWS
    return RowForm(plain=False, quantized=gate_up.values.dtype)


def takes_shared_quantized(
    x: Activations, gate_up: Weight, shared_gate_up: Weight, shared_down: Weight
) -> bool:
    """Whether one token's shared experts run in the kernels of the routed experts. Their blocks of scales must be the
    same. On an H200 V3's, with 7,168 inputs, are faster beside the routed experts."""
    weights = (gate_up, shared_gate_up, shared_down)
    if gate_up.values.shape[2] > MAX_SHARED_INPUTS:
        return False
    if not all(has_kernel(x, weight) for weight in weights):
        return False
    return gate_up.block == shared_gate_up.block and gate_up.block[0] == shared_down.block[0]


def quantized_experts_torch(
    x: Tensor,
    gate_up: Weight,
    down: Weight,
    weights: Tensor,
    ids: Tensor,
    plus: Callable[[], Term] | None = None,
    total: int | None = None,
) -> Tensor:
    """`moe_experts`, of which one projection at least is quantized. Quantizes the rows that the kernels quantize, and
    sums in float32.

    Reads `ids`, and dequantizes the routed experts alone, one at a time. Dequantizing all of them would take most of the
    time of a small step, and tens of gigabytes in DeepSeek-V3.
    """
    top_k, experts = ids.shape[1], len(gate_up.values)
    tiling = quantized_tiling(len(x), top_k, total or experts, hopper_rows(gate_up, down))
    dtype = gate_up.values.dtype
    is_rounded = tiling.rows > 1 and all(map(_rounds_rows, (gate_up, down)))
    rows = round_rows(x, dtype) if is_rounded else x.float()
    pairs = {
        expert: (ids == expert).nonzero(as_tuple=True)
        for expert in ids[ids >= 0].bincount().nonzero().flatten().tolist()
    }
    gated = rows.new_zeros(*ids.shape, gate_up.values.shape[1] // 2)
    for expert, at in pairs.items():
        gated[at] = silu_and_mul_torch(_product(rows[at[0]], gate_up, expert))
    if is_rounded:
        gated = round_rows(gated.flatten(0, 1), dtype, tiling.gate_up.block_n).view_as(gated)
    out = x.new_zeros(*ids.shape, x.shape[1])
    for expert, at in pairs.items():
        out[at] = _product(gated[at], down, expert).to(out.dtype)
    return weighted_sum(out, weights, plus)


def quantized_experts(
    x: Activations,
    gate_up: Weight,
    down: Weight,
    weights: Tensor,
    ids: Tensor,
    plus: Callable[[], Term] | None = None,
    *,
    shared: SharedWeights | None = None,
    total: int | None = None,
    tiling: MoeTiling | None = None,
) -> Tensor:
    """`moe_experts` of at least one token. `shared`, for one token alone, stands for `plus`. `tiling` replaces
    `quantized_tiling`, for benchmarks."""
    ids = ids.contiguous()
    experts = len(gate_up.values)
    tiling = tiling or _tiling(x, gate_up, down, ids.shape[1], total)
    if tiling.rows == 1:
        x = dense_rows(x).contiguous()
        first, second = shared or (None, None)
        products = gate_up_pairs_quantized(x, gate_up, ids, tiling.gate_up, first)
        added = plus().padded(len(ids)) if plus else None
        return down_pairs_quantized(products, down, weights, ids, tiling.down, added, second)
    assert shared is None, f"shared experts of {len(ids)} tokens"
    multiply_first, multiply_second = grouped_products(tiling.rows, tiling.gate_up.num_warps)
    align = moe_align if _is_of_hopper(tiling) else blocks_for
    blocks = align(ids, experts, tiling.rows)
    rows = as_quantized(x, gate_up.values.dtype)
    gated = multiply_first(rows, gate_up, blocks, tiling.gate_up)
    out = multiply_second(gated, down, blocks, tiling.down)
    return combine(out, weights, plus() if plus else None)


def grouped_products(rows: int, num_warps: int) -> tuple[FirstProduct, SecondProduct]:
    """Returns the functions of both products for blocks of so many rows. Those of Hopper take sorted blocks."""
    if num_warps != NUM_WARPS:
        return gate_up_quantized, down_quantized
    return (gate_up_hopper, down_hopper) if rows == ROWS else (gate_up_few, down_few)


def _rounds_rows(weight: Weight) -> bool:
    return not weight.is_plain and not weight.weight_only and has_whole_groups(weight)


def _product(rows: Tensor, weight: Weight, expert: int) -> Tensor:
    return functional.linear(rows, weight.expert(expert).dense(torch.float32).values.float())


def _tiling(
    x: Activations, gate_up: Weight, down: Weight, top_k: int, total: int | None = None
) -> MoeTiling:
    """Returns the tiling of a table (`tuned.py`), or else of `quantized_tiling`. Pairs that stream weights have no
    table."""
    experts, double, _ = gate_up.values.shape
    tokens = x.shape[0]
    hopper = hopper_rows(gate_up, down) if is_hopper(x.device) else NO_ROWS
    rule = quantized_tiling(tokens, top_k, total or experts, hopper)
    if rule.rows == 1:
        return rule
    kind = kind_of(gate_up.values.dtype, gate_up.block)
    found = tuned_tiling(device_name(x.device), experts, double // 2, kind, tokens)
    return found if found and (hopper != NO_ROWS or not _is_of_hopper(found)) else rule


def _is_of_hopper(tiling: MoeTiling) -> bool:
    return tiling.gate_up.num_warps == NUM_WARPS


class HopperRows(NamedTuple):
    """Rows of an expert, in the mean, for which Hopper's kernels are faster: from `least` to `few`, and from `many` on."""

    least: float
    few: float
    many: float


# Measured on an H200, alone and in steps (docs/design/kernel_choices.md)
ROWS_OF_NARROW, ROWS_OF_WIDE = HopperRows(0, 24, 60), HopperRows(6, 24, 40)
# Up to these rows of an expert most weights have one block. Blocks with common weights must keep pace, or L2 loses them
SKIPPING_ROWS = 160
NO_ROWS = HopperRows(0, 0, math.inf)


def hopper_rows(gate_up: Weight, down: Weight) -> HopperRows:
    """Returns the rows for which Hopper's kernels are faster for experts with these weights."""
    if not has_whole_tiles(gate_up, down):
        return NO_ROWS
    return ROWS_OF_WIDE if gate_up.values.shape[2] > WIDE_INPUTS else ROWS_OF_NARROW


def quantized_tiling(
    tokens: int, top_k: int, experts: int, hopper: HopperRows = NO_ROWS
) -> MoeTiling:
    """Returns fast tiles of sweeps with V2-Lite's and V3's experts: on an H200 for blocks of 64 rows, else on an H100.
    `experts`: of all ranks. `hopper`: the rows of Hopper's kernels, where they serve the experts."""
    if tokens == 1 or (tokens <= MAX_PAIRED_TOKENS and tokens * EXPERTS_OF_PAIRS <= experts):
        gate_up = Tile(2, 512, num_warps=2, num_stages=4)
        return MoeTiling(1, gate_up, down=Tile(2, 512, num_warps=2, num_stages=8))
    if tokens * top_k <= 24 * experts:
        rows = 16 if tokens * top_k <= 12 * experts else 32
        if hopper.least * experts <= tokens * top_k <= hopper.few * experts:
            return MoeTiling(rows, Tile(128, 128, 1, NUM_WARPS), Tile(64, 128, 1, NUM_WARPS))
        return MoeTiling(rows, gate_up=Tile(128, 128, 8, 4, 3), down=Tile(64, 128, 2, 4, 6))
    if tokens * top_k >= hopper.many * experts:
        skips = tokens * top_k <= SKIPPING_ROWS * experts
        gate_up = Tile(128, 128, 16, NUM_WARPS, 4, skips)
        return MoeTiling(ROWS, gate_up, down=Tile(256, 128, 8, NUM_WARPS, 4, skips))
    return MoeTiling(64, gate_up=Tile(64, 128, 8, 4, 3), down=Tile(128, 64, 2, 4, 4))
