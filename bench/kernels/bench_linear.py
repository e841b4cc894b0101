"""linear in bf16 on one row and on a few, at the weights of decode steps, beside torch's library.

    python bench/kernels/bench_linear.py [--rows 1 2 8 32 64] [--sweep] [--out bench/results/linear.jsonl]

The time is that of one of many products in a CUDA graph, with different weights in turn, so that each is read from
memory. The floor is the time to read the weight. `--sweep` names the best tiling.
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
from torch import Tensor
from triton.runtime.errors import OutOfResources

from mla_router.worker.kernels.few_rows import MAX_INPUTS, MAX_ROWS, Tiles, few_rows_linear
from mla_router.worker.kernels.linear import linear, linear_triton
from mla_router.worker.kernels.linear_hopper import is_fastest
from mla_router.worker.kernels.weight import Weight

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record
from timing import floor_us, time_graph_us

WEIGHTS = {
    "V2-Lite output": (2048, 2048),
    "V2-Lite queries and latent": (3648, 2048),
    "V2-Lite shared gate and up": (5632, 2048),
    "V2-Lite shared down": (2048, 2816),
    "V3 latents": (2112, 7168),
    "V3 queries": (24576, 1536),
    "V3 shared down": (7168, 2048),
    "Llama queries, keys and values": (6144, 4096),
    "Llama output": (4096, 4096),
    "Llama gate and up": (28672, 4096),
    "Llama down": (4096, 14336),
    "Gemma queries, keys and values": (8192, 3584),
    "Gemma output": (3584, 4096),
    "Gemma gate and up": (28672, 3584),
    "Gemma down": (3584, 14336),
}
ONE_ROW_TILES = tuple(product((1, 2, 4, 8), (512, 1024, 2048), (4, 8)))
FEW_ROWS_TILES = tuple(Tiles(*t) for t in product((16, 32), (64, 128, 256), (4, 8)))
COLD_BYTES = 200 << 20  # of weights that take turns, so that none is in L2 when its turn comes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


class Case:
    def __init__(self, name: str, rows: int) -> None:
        outputs, inputs = WEIGHTS[name]
        copies = min(max(2, COLD_BYTES // (2 * outputs * inputs)), 64)
        self.x = torch.randn(rows, inputs, device="cuda").bfloat16()
        self.weights = torch.randn(copies, outputs, inputs, device="cuda").bfloat16()

    def ours(self, weight: Tensor, tiles: Any = None) -> Tensor:
        return ours(self.x, weight, tiles)

    def time_us(self, product: Callable[[Tensor], Tensor]) -> float:
        turn = cycle(self.weights)
        return time_graph_us(lambda: product(next(turn)), launches=len(self.weights), replays=5)


def ours(x: Tensor, weight: Tensor, tiles: Any) -> Tensor:
    if tiles is None:
        return linear(x, Weight(weight, constant=True))
    product = linear_triton if len(x) == 1 else few_rows_linear
    return product(x, weight, out_dtype=x.dtype, constant=True, tiles=tiles)


def tile_space(name: str, rows: int) -> tuple[Any, ...]:
    """Returns the tiles of the kernel for one row or a few, or none if another kernel or the library is the fastest."""
    outputs, inputs = WEIGHTS[name]
    if is_fastest(torch.empty(rows, 0, device="cuda"), outputs, inputs):
        return ()
    if rows == 1:
        return ONE_ROW_TILES
    return FEW_ROWS_TILES if rows <= MAX_ROWS and inputs <= MAX_INPUTS else ()


def compiles(job: tuple[str, int, Any]) -> bool:
    name, rows, tiles = job
    outputs, inputs = WEIGHTS[name]
    x = torch.zeros(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    try:
        ours(x, weight, tiles)
    except OutOfResources:
        return False
    return True


def measure(name: str, rows: int, tiles: list[Any]) -> dict[str, Any]:
    case = Case(name, rows)
    row = {
        "weight": name,
        "rows": rows,
        "us": round(case.time_us(case.ours), 2),
        "torch_us": round(case.time_us(lambda w: torch.mm(case.x, w.t())), 2),
        "floor_us": round(floor_us(moved_bytes=case.weights[0].nbytes), 2),
    }
    if tiles:
        times = {t: case.time_us(partial(case.ours, tiles=t)) for t in tiles}
        best = min(times, key=lambda tiles: times[tiles])
        row |= {"best_us": round(times[best], 2), "best": list(best)}
    return row


def main() -> None:
    args = parse_args()
    cases = list(product(args.weights, args.rows))
    tiles: dict[tuple[str, int], list[Any]] = {case: [] for case in cases}
    if args.sweep:
        jobs = [(*case, t) for case in cases for t in tile_space(*case)]
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=spawn) as pool:
            for (name, rows, t), fit in zip(
                jobs, pool.map(compiles, jobs, chunksize=4), strict=True
            ):
                if fit:
                    tiles[name, rows].append(t)
    measured = []
    print(f"{'weight':36}rows        us  torch us    floor  of floor")
    for name, rows in cases:
        row = measure(name, rows, tiles[name, rows])
        measured.append(row)
        print(
            f"{name:36}{rows:4} {row['us']:9.2f} {row['torch_us']:9.2f} {row['floor_us']:8.2f} "
            f"{row['floor_us'] / row['us']:9.1%}  {row.get('best_us', '')} {row.get('best', '')}",
            flush=True,
        )
    record("linear", {"rows": measured}, args.out)


if __name__ == "__main__":
    main()
