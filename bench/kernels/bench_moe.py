"""The time of the mixture of experts, part by part, and the time to read the experts' weights.

    python bench/kernels/bench_moe.py [--model v2-lite] [--tokens 1 8 128] [--default] [--out FILE]

`whole` is routing and experts in a CUDA graph over the weights of three layers, as in a decode step. `route` and
`align` are one of many consecutive calls in a CUDA graph; the other parts, and `torch`, are single calls with a cold
L2. The floor is the larger of two times: to read the weights of the used experts once, and to compute the products.
`torch` is the op in plain torch (sort, grouped_mm) with the same routing. `--default` ignores the table of tilings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.moe_cases import (
    MODELS,
    Case,
    MoeModel,
    floors_us,
    random_case,
    random_layers,
    route,
    time_layers_us,
)
from kernels.timing import time_graph_us, time_us
from record import record

from mla_router.worker.kernels.moe.align import blocks_for
from mla_router.worker.kernels.moe.combine import combine
from mla_router.worker.kernels.moe.down_gemm import down_blocks
from mla_router.worker.kernels.moe.experts import moe_experts_torch, moe_experts_triton
from mla_router.worker.kernels.moe.gate_up_gemm import gate_up_blocks
from mla_router.worker.kernels.moe.gemv import down_pairs, gate_up_pairs
from mla_router.worker.kernels.moe.tiling import MoeTiling, default_tiling, moe_tiling

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def parts(case: Case, gate_up: Tensor, down: Tensor, tiling: MoeTiling) -> dict[str, float]:
    """us of each launch of moe_experts."""
    x, weights, ids = case.x, case.weights, case.ids
    if tiling.rows == 1:
        gated = gate_up_pairs(x, gate_up, ids, tiling.gate_up)
        return {
            "align": 0.0,
            "gate_up": time_us(lambda: gate_up_pairs(x, gate_up, ids, tiling.gate_up)),
            "down": time_us(lambda: down_pairs(gated, down, weights, ids, tiling.down)),
            "combine": 0.0,
        }
    blocks = blocks_for(ids, len(gate_up), tiling.rows)
    gated = gate_up_blocks(x, gate_up, blocks, tiling.gate_up)
    rows = down_blocks(gated, down, blocks, tiling.down)
    return {
        "align": 0.0
        if blocks.pairs is None
        else time_graph_us(lambda: blocks_for(ids, len(gate_up), tiling.rows)),
        "gate_up": time_us(lambda: gate_up_blocks(x, gate_up, blocks, tiling.gate_up)),
        "down": time_us(lambda: down_blocks(gated, down, blocks, tiling.down)),
        "combine": time_us(lambda: combine(rows, weights)),
    }


def measure(
    model: MoeModel, tokens: int, layers: list[tuple[Tensor, Tensor]], tiling: MoeTiling
) -> dict[str, Any]:
    case = random_case(model, tokens)

    def whole(gate_up: Tensor, down: Tensor) -> Tensor:
        return moe_experts_triton(case.x, gate_up, down, *route(model, case.logits), tiling=tiling)

    gate_up_floor, down_floor = floors_us(model, case)
    floor, took = gate_up_floor + down_floor, time_layers_us(layers, whole)
    row = {
        "model": model.name,
        "tokens": tokens,
        "experts_hit": case.experts_hit,
        "rows": tiling.rows,
        "route_us": time_graph_us(lambda: route(model, case.logits)),
        **{f"{part}_us": us for part, us in parts(case, *layers[0], tiling).items()},
        "whole_us": took,
        "floor_us": floor,
        "percent": 100 * floor / took,
        "tflops": 6e-6 * case.ids.numel() * model.hidden * model.width / took,
        "torch_us": time_us(lambda: moe_experts_torch(case.x, *layers[0], case.weights, case.ids)),
    }
    return {name: round(v, 1) if isinstance(v, float) else v for name, v in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="v2-lite")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument(
        "--default", action="store_true", help="the tilings of a shape with no table"
    )
    parser.add_argument("--out", type=Path, help="file of JSON lines to append the result to")
    args = parser.parse_args()
    model = MODELS[args.model]
    layers = random_layers(model)
    measured = []
    for tokens in args.tokens:
        tiling = (
            default_tiling(model.shape, tokens, model.top_k)
            if args.default
            else moe_tiling(torch.cuda.get_device_name(), model.shape, tokens, model.top_k)
        )
        row = measure(model, tokens, layers, tiling)
        if not measured:
            print(" ".join(f"{name.removesuffix('_us'):>11}" for name in row))
        print(" ".join(f"{value:>11}" for value in row.values()), flush=True)
        measured.append(row)
    record("moe", {"measured": measured}, args.out)


if __name__ == "__main__":
    main()
