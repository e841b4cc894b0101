"""Batched products with FP8 operands beside torch.bmm with bfloat16: cosine similarity and latency.

    python bench/kernels/bench_fp8_bmm.py [--heads 16 128] [--tokens 1 8 32 64 128 256] [--out bench/results/fp8_bmm.jsonl]

One case is one of MLA's products of decode: q [H, T, 128] @ W_UK [H, 128, 512], or latents [H, T, 512] @ W_UV
[H, 512, 128]. Operands are drawn from N(0, 1). Weights have a scale for each block of 128 x 128. The forms:

    cast             activations stay bfloat16, weights are E4M3 and become float16 in registers
    A x W            activations of format A with one static scale, weights of format W, on FP8 tensor cores

The static scale is the largest magnitude divided by the largest number of the format. The cosine similarity compares with
torch.bmm of the bfloat16 operands. Without a GPU it is computed by the definition in torch, and there are no latencies.

The latency is that of one of 32 products in a CUDA graph, whose weights take turns: each is read from memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.kernels.attention.absorb import (
    absorb_queries_torch,
    absorb_queries_triton,
    expand_values_torch,
    expand_values_triton,
)
from mla_router.worker.kernels.attention.absorb_quantized import StaticFP8
from mla_router.worker.kernels.kv_cache.fp8 import to_cache
from mla_router.worker.kernels.weight import Weight

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}
# Formats of activations and of weights. E5M2 by E5M2 would be the least exact, and libraries do not have it
PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
WIDTHS = {"W_UK": (128, 512), "W_UV": (512, 128)}  # inputs and outputs of a head
LAYERS = 32
BLOCK = 128


def quantized(matrices: Tensor, dtype: torch.dtype) -> Weight:
    """Returns [L, H, N, K] in blocks of 128 x 128."""
    layers, heads, rows, columns = matrices.shape
    blocks = matrices.float().view(layers, heads, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(3, 5)) / torch.finfo(dtype).max
    values = to_cache(blocks / scales[:, :, :, None, :, None], dtype)
    return Weight(values.view(matrices.shape), scales, (BLOCK, BLOCK), constant=True)


def one_layer(weights: Weight) -> list[Weight]:
    """Returns the weight of each layer."""
    assert weights.scales is not None
    pairs = zip(weights.values, weights.scales, strict=True)
    return [weights._replace(values=values, scales=scales) for values, scales in pairs]


def multiply(x: Tensor, fp8: StaticFP8 | None, weight: Weight, *, transposed: bool) -> Tensor:
    """Returns x [T, H, K] times the weight of each head, by the kernel on a GPU."""
    if not transposed:
        return (absorb_queries_triton if x.is_cuda else absorb_queries_torch)(x, weight, fp8)
    out = x.new_empty(*x.shape[:2], weight.values.shape[1])
    (expand_values_triton if x.is_cuda else expand_values_torch)(x, weight, out, fp8)
    return out


def library(x: Tensor, matrix: Tensor, *, transposed: bool) -> Tensor:
    by_head = matrix.transpose(1, 2) if transposed else matrix
    return torch.bmm(x.transpose(0, 1), by_head).transpose(0, 1)


def latency_us(run: Callable[[Any], Tensor], weights: list[Any]) -> float | None:
    if not torch.cuda.is_available():
        return None
    from timing import time_graph_us

    turn = cycle(weights)
    us: float = time_graph_us(lambda: run(next(turn)), launches=len(weights), replays=5)
    return round(us, 2)


def measure(name: str, heads: int, tokens: int) -> list[dict[str, Any]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs, outputs = WIDTHS[name]
    transposed = name == "W_UV"
    draw = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, heads, inputs, generator=draw, device=device).bfloat16()
    sizes = (outputs, inputs) if transposed else (inputs, outputs)
    layers = LAYERS if device == "cuda" else 1
    plain = torch.randn(layers, heads, *sizes, generator=draw, device=device).bfloat16()
    run_library = partial(library, x, transposed=transposed)
    reference = run_library(plain[0]).flatten().double()
    row = {"matrix": name, "heads": heads, "tokens": tokens}
    rows = [row | {"form": "bf16", "us": latency_us(run_library, list(plain))}]
    for pair in (None, *PAIRS):
        fp8, of_weights = None, E4M3
        if pair is not None:
            largest = float(x.abs().amax()) / torch.finfo(pair[0]).max
            fp8, of_weights = StaticFP8(pair[0], largest), pair[1]
        weights = one_layer(quantized(plain, of_weights))
        run = partial(multiply, x, fp8, transposed=transposed)
        got = run(weights[0]).flatten().double()
        similarity = torch.nn.functional.cosine_similarity(reference, got, dim=0)
        form = "cast" if pair is None else f"{NAMES[pair[0]]} x {NAMES[pair[1]]}"
        figures = {"cosine": round(float(similarity), 5), "us": latency_us(run, weights)}
        rows.append(row | {"form": form} | figures)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    measured = []
    print(f"{'matrix':8}{'heads':>6}{'tokens':>7}  {'form':12}{'cosine':>9}{'us':>9}")
    for case in product(WIDTHS, args.heads, args.tokens):
        for row in measure(*case):
            measured.append(row)
            cosine, us = row.get("cosine", ""), row["us"] if row["us"] is not None else "-"
            print(
                f"{row['matrix']:8}{row['heads']:6}{row['tokens']:7}  {row['form']:12}{cosine:>9}{us:>9}",
                flush=True,
            )
    record("fp8_bmm", {"rows": measured}, args.out)


if __name__ == "__main__":
    main()
