"""linear in bf16 on one row, at the weights of V2-Lite's and V3's decode, beside torch's library.

    python bench/kernels/bench_linear.py [--sweep] [--out bench/results/linear.jsonl]

Time is that of one of many products in a CUDA graph, with weights that take turns so that each is read
from memory. The floor is the reading of the weight. `--sweep` names the best tiling.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch

from mla_router.worker.kernels.linear import linear_triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record
from timing import floor_us, time_graph_us

WEIGHTS = {
    "V2-Lite output": (2048, 2048),
    "V2-Lite queries and latent": (3648, 2048),
    "V2-Lite shared gate and up": (5632, 2048),
    "V2-Lite shared down": (2048, 2816),
    "V3 latents": (2112, 7168),
    "V3 shared down": (7168, 2048),
}
TILES = tuple(product((1, 2, 4, 8), (512, 1024, 2048), (4, 8)))
COLD_BYTES = 200 << 20  # of weights that take turns, so that none is in L2 when its turn comes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


Tiles = tuple[int, int, int]


class Case:
    def __init__(self, name: str) -> None:
        outputs, inputs = WEIGHTS[name]
        copies = min(max(2, COLD_BYTES // (2 * outputs * inputs)), 64)
        self.x = torch.randn(1, inputs, device="cuda").bfloat16()
        self.weights = torch.randn(copies, outputs, inputs, device="cuda").bfloat16()

    def ours(self, weight: torch.Tensor, tiles: Tiles | None = None) -> torch.Tensor:
        return linear_triton(self.x, weight, out_dtype=weight.dtype, constant=True, tiles=tiles)

    def time_us(self, product: Callable[[torch.Tensor], torch.Tensor]) -> float:
        turn = cycle(self.weights)
        return time_graph_us(lambda: product(next(turn)), launches=len(self.weights), replays=5)


def compile_one(job: tuple[str, Tiles]) -> None:
    name, tiles = job
    outputs, inputs = WEIGHTS[name]
    x = torch.zeros(1, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    linear_triton(x, weight, out_dtype=x.dtype, constant=True, tiles=tiles)


def measure(name: str, sweep: bool) -> dict[str, Any]:
    case = Case(name)
    row = {
        "weight": name,
        "us": round(case.time_us(case.ours), 2),
        "torch_us": round(case.time_us(lambda w: torch.mm(case.x, w.t())), 2),
        "floor_us": round(floor_us(moved_bytes=case.weights[0].nbytes), 2),
    }
    if sweep:
        times = {t: case.time_us(partial(case.ours, tiles=t)) for t in TILES}
        best = min(times, key=lambda tiles: times[tiles])
        row |= {"best_us": round(times[best], 2), "best": list(best)}
    return row


def main() -> None:
    args = parse_args()
    rows = []
    print(f"{'weight':28}       us  torch us    floor  of floor")
    if args.sweep:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
            list(pool.map(compile_one, product(args.weights, TILES), chunksize=8))
    for name in args.weights:
        row = measure(name, args.sweep)
        rows.append(row)
        print(
            f"{name:28} {row['us']:8.2f} {row['torch_us']:9.2f} {row['floor_us']:8.2f} "
            f"{row['floor_us'] / row['us']:9.1%}  {row.get('best_us', '')} {row.get('best', '')}",
            flush=True,
        )
    record("linear", {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
