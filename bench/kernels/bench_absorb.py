"""The two products around MLA's decode attention, beside torch.bmm.

    python bench/kernels/bench_absorb.py [--out bench/results/absorb.jsonl]

The time is that of one pair of products in a CUDA graph of 64 layers in turn, so that every weight is read from
memory. The floor is the time to read the weights. All possible pairs of columns per program are timed; `us` is the
chosen pair.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch

from mla_router.worker.kernels.attention.absorb import (
    absorb_queries_torch,
    absorb_queries_triton,
    expand_values_torch,
    expand_values_triton,
    tiling,
)
from mla_router.worker.kernels.weight import Weight

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record
from timing import floor_us, time_graph_us

LAYERS = 64
COLUMNS = tuple(product((32, 64, 128), (16, 32)))  # of a program, of either product


def measure(heads: int, tokens: int) -> dict[str, Any]:
    q = torch.randn(tokens, heads, 192, device="cuda").bfloat16()[..., :128]
    out = q.new_empty(tokens, heads, 128)
    weights = torch.randn(LAYERS, heads, 256, 512, device="cuda").bfloat16()

    def time(pair: Callable[[Weight, Weight], None]) -> float:
        turn = cycle(weights)

        def one() -> None:
            both = next(turn)
            pair(Weight(both[:, :128]), Weight(both[:, 128:]))

        return round(time_graph_us(one, launches=LAYERS, replays=5), 2)

    def library(w_uk: Weight, w_uv: Weight) -> None:
        expand_values_torch(absorb_queries_torch(q, w_uk), w_uv, out)

    def ours(latents: int, values: int) -> Callable[[Weight, Weight], None]:
        def pair(w_uk: Weight, w_uv: Weight) -> None:
            latent = absorb_queries_triton(q, w_uk, columns=latents)
            expand_values_triton(latent, w_uv, out, columns=values)

        return pair

    row = {
        "heads": heads,
        "tokens": tokens,
        "torch_us": time(library),
        "floor_us": round(floor_us(moved_bytes=weights[0].nbytes), 2),
    }
    times = {columns: time(ours(*columns)) for columns in COLUMNS}
    best = min(times, key=lambda columns: times[columns])
    return row | {"us": times[tiling(heads, tokens)], "best_us": times[best], "best": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for heads, tokens in product(args.heads, args.tokens):
        rows.append(measure(heads, tokens))
        print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="  ", flush=True)
    record("absorb", {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
