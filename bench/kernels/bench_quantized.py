"""Products with FP8 weights in blocks of 128 x 128, dense and of experts, at the sizes of V2-Lite and V3.

    python bench/kernels/bench_quantized.py [--rows 1 8 32 64 128 1024] [--out bench/results/quantized.jsonl]

The time is that of one of many products in a CUDA graph, with different weights in turn, so that each is read from
memory. The floor is the time to read the weight once, or of the product at cuBLAS's speed with block scales. Beside the
dense products is torch's library with bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.moe.quantized_experts import quantized_experts
from mla_router.worker.kernels.quantized_linear import for_library
from mla_router.worker.kernels.weight import Weight

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench_linear import WEIGHTS
from record import record
from timing import H200_BYTES_PER_SECOND, time_graph_us

DENSE = WEIGHTS | {"V3 output": (7168, 16384), "V3 shared gate and up": (4096, 7168)}
EXPERTS = {"V2-Lite experts": (64, 2048, 1408, 6), "V3 experts": (256, 7168, 2048, 8)}
FP8_FLOPS = 1277e12  # of one H200, measured: cuBLAS, 8192-cubed, without block scales
COLD_BYTES = 160 << 20  # of weights that take turns, so that none is in L2 when its turn comes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 1024])
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def drawn(*sizes: int) -> Weight:
    values = torch.randint(0, 0x70, sizes, dtype=torch.uint8, device="cuda")
    blocks = *sizes[:-2], -(-sizes[-2] // 128), -(-sizes[-1] // 128)
    scales = torch.full(blocks, 1e-3, device="cuda")
    weight = Weight(values.view(torch.float8_e4m3fn), scales, (128, 128), constant=True)
    return for_library(weight)


def rows_of(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, device="cuda").bfloat16()


def in_turn(product: Callable[[Any], Tensor], weights: list[Any]) -> float:
    turn = cycle(weights)
    return time_graph_us(lambda: product(next(turn)), launches=len(weights), replays=5)


def dense(name: str, rows: int) -> dict[str, Any]:
    outputs, inputs = DENSE[name]
    copies = min(max(2, COLD_BYTES // (outputs * inputs)), 32)
    x = rows_of(rows, inputs)
    us = in_turn(lambda weight: linear(x, weight), [drawn(outputs, inputs) for _ in range(copies)])
    plain = [rows_of(outputs, inputs) for _ in range(copies)]
    bf16_us = in_turn(lambda weight: torch.mm(x, weight.t()), plain)
    return row(name, rows, us, outputs * inputs, 2 * rows * outputs * inputs) | {
        "bf16_us": round(bf16_us, 2)
    }


def experts(name: str, tokens: int) -> dict[str, Any]:
    count, hidden, width, top_k = EXPERTS[name]
    x = rows_of(tokens, hidden)
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]).int().cuda()
    shares = torch.rand(tokens, top_k, device="cuda")
    layers = [(drawn(count, 2 * width, hidden), drawn(count, hidden, width)) for _ in range(2)]
    us = in_turn(lambda layer: quantized_experts(x, *layer, shares, ids), layers)
    weights = 3 * hidden * width
    return row(name, tokens, us, len(ids.unique()) * weights, 2 * ids.numel() * weights)


def row(name: str, rows: int, us: float, read: int, flops: int) -> dict[str, Any]:
    floor = max(read / H200_BYTES_PER_SECOND, flops / FP8_FLOPS) * 1e6
    return {"weight": name, "rows": rows, "us": round(us, 2), "floor_us": round(floor, 2)}


def main() -> None:
    args = parse_args()
    measured = []
    print(f"{'weight':28}rows        us    floor  of floor   bf16 us")
    for name in (*DENSE, *EXPERTS):
        for rows in args.rows:
            figures = dense(name, rows) if name in DENSE else experts(name, rows)
            measured.append(figures)
            share = figures["floor_us"] / figures["us"]
            print(
                f"{name:28}{rows:4} {figures['us']:9.2f} {figures['floor_us']:8.2f} {share:9.1%} "
                f"{figures.get('bf16_us', ''):>9}",
                flush=True,
            )
    record("quantized", {"rows": measured}, args.out)


if __name__ == "__main__":
    main()
