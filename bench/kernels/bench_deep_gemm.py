"""Products with FP8 weights in blocks of 128 x 128, beside DeepGEMM's (github.com/deepseek-ai/DeepGEMM), if it is installed.

    pip install sgl-deep-gemm==0.1.4 apache-tvm-ffi==0.1.11   # needs nvcc, and torch 2.11
    python bench/kernels/bench_deep_gemm.py [--out bench/results/deep_gemm.jsonl]

Dense products at V3's sizes, and those of V2-Lite's 64 experts for rows that are sorted by expert. All take quantized rows. Our
first product of the experts also gathers its rows, multiplies silu(gate) * up and quantizes the result; DeepGEMM's result
is plain. The time is that of one of many products in a CUDA graph, with different weights in turn. `difference`: of both
results, relative.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.moe.align import blocks_for
from mla_router.worker.kernels.moe.quantized_experts import HopperRows, quantized_tiling
from mla_router.worker.kernels.moe.quantized_gemm_hopper import ROWS, down_hopper, gate_up_hopper
from mla_router.worker.kernels.quantize import quantize_rows
from mla_router.worker.kernels.weight import Weight

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench_quantized import COLD_BYTES, drawn, rows_of
from record import record
from timing import time_graph_us

FP8 = torch.float8_e4m3fn
DENSE = [(7168, 16384), (24576, 1536), (4096, 7168), (7168, 2048), (2112, 7168)]  # outputs, inputs
ROW_COUNTS = (64, 512, 4096)
EXPERTS, HIDDEN, WIDTH, TOP_K = 64, 2048, 1408, 6
TOKENS = (1024, 8192)
PROCESSES = 12  # that compile DeepGEMM's kernels

Case = tuple[str, int, int, int]  # kind, outputs, inputs, rows or tokens
Product = Callable[[Weight], Tensor]


def cases() -> list[Case]:
    dense = [("dense", *shape, rows) for shape in DENSE for rows in ROW_COUNTS]
    grouped = [
        (kind, *shape, tokens)
        for tokens in TOKENS
        for kind, shape in (("gate and up", (2 * WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH)))
    ]
    return [*dense, *grouped]


def both(case: Case) -> tuple[list[Weight], Product, Product]:
    """Returns weights, our product with one of them, and DeepGEMM's."""
    kind, outputs, inputs, count = case
    torch.manual_seed(0)
    return (
        dense(outputs, inputs, count)
        if kind == "dense"
        else grouped(kind, outputs, inputs, tokens=count)
    )


def dense(outputs: int, inputs: int, rows: int) -> tuple[list[Weight], Product, Product]:
    import deep_gemm

    copies = min(max(2, COLD_BYTES // (outputs * inputs)), 32)
    weights = [drawn(outputs, inputs) for _ in range(copies)]
    x = quantize_rows(rows_of(rows, inputs), FP8)
    theirs_x = x.values, deep_gemm.get_mn_major_tma_aligned_tensor(x.scales)
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device="cuda")

    def theirs(weight: Weight) -> Tensor:
        deep_gemm.fp8_gemm_nt(theirs_x, (weight.values, weight.scales), out)
        return out

    return weights, partial(linear, x), theirs


def grouped(
    kind: str, outputs: int, inputs: int, tokens: int
) -> tuple[list[Weight], Product, Product]:
    import deep_gemm

    weights = [drawn(EXPERTS, outputs, inputs) for _ in range(2)]
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices.int()
    blocks = blocks_for(ids, EXPERTS, ROWS)
    assert blocks.pairs is not None and blocks.experts is not None and blocks.count is not None
    tiling = quantized_tiling(tokens, TOP_K, EXPERTS, hopper=HopperRows(least=0, few=0, many=1))
    pairs = blocks.pairs[: int(blocks.count) * ROWS]
    real = pairs < ids.numel()
    owners = blocks.experts[: int(blocks.count)].repeat_interleave(ROWS)
    layout = torch.where(real, owners, -1).int()
    if kind == "gate and up":
        x = quantize_rows(rows_of(tokens, inputs), FP8)
        sorted_rows = torch.where(real, pairs // TOP_K, 0)
        ours = lambda weight: gate_up_hopper(x, weight, blocks, tiling.gate_up).values
        values = x.values.view(torch.uint8)[sorted_rows].view(FP8)
        scales = x.scales[sorted_rows]
    else:
        x = quantize_rows(rows_of(len(pairs), inputs), FP8)
        ours = lambda weight: down_hopper(x, weight, blocks, tiling.down)
        values, scales = x.values, x.scales
    theirs_x = values, deep_gemm.get_mn_major_tma_aligned_tensor(scales.contiguous())
    out = torch.empty(len(pairs), outputs, dtype=torch.bfloat16, device="cuda")

    def theirs(weight: Weight) -> Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            theirs_x, (weight.values, weight.scales), out, layout
        )
        return out

    return weights, ours, theirs


def compile_theirs(case: Case) -> None:
    weights, _, theirs = both(case)
    theirs(weights[0])
    torch.cuda.synchronize()


def measure(case: Case) -> dict[str, Any]:
    kind, outputs, inputs, count = case
    weights, ours, theirs = both(case)
    difference = None
    if kind == "dense":
        got, expected = ours(weights[0]).float(), theirs(weights[0]).float()
        difference = ((got - expected).norm() / expected.norm()).item()
    rows = count if kind == "dense" else count * TOP_K
    us = []
    for product in (ours, theirs):
        turn = cycle(weights)
        us.append(time_graph_us(lambda: product(next(turn)), launches=len(weights), replays=7))  # noqa: B023
    flops = 2 * rows * outputs * inputs
    return {
        "product": kind,
        "outputs": outputs,
        "inputs": inputs,
        "rows" if kind == "dense" else "tokens": count,
        "us": round(us[0], 1),
        "deep_gemm_us": round(us[1], 1),
        "tflops": round(flops / us[0] / 1e6),
        "deep_gemm_tflops": round(flops / us[1] / 1e6),
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if importlib.util.find_spec("deep_gemm") is None:
        raise SystemExit("DeepGEMM is not installed: see the first lines of this file")
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_theirs, cases()))
    rows = []
    print("product       outputs inputs  rows        us  DeepGEMM   TF    TF difference")
    for case in cases():
        rows.append(measure(case))
        us, theirs, tflops, their_tflops, difference = list(rows[-1].values())[4:]
        print(
            f"{case[0]:13} {case[1]:7} {case[2]:6} {case[3]:5} {us:9.1f} {theirs:9.1f} {tflops:4} {their_tflops:5} "
            f"{'' if difference is None else f'{difference:.1e}'}",
            flush=True,
        )
    record("deep_gemm", {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
