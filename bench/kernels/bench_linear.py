"""linear in bf16 on few rows, at the weights of V2-Lite's and V3's decode, beside torch's library.

    python bench/kernels/bench_linear.py [--sweep] [--out bench/results/linear.jsonl]

The floor is the reading of the weight. `--sweep` names the best tiling of each case.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from mla_router.worker.kernels.linear import Tiling, linear_triton, tiling

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record
from timing import floor_us, time_us

WEIGHTS = {
    "V2-Lite router": (64, 2048),
    "V2-Lite output": (2048, 2048),
    "V2-Lite queries and latent": (3648, 2048),
    "V2-Lite shared gate and up": (5632, 2048),
    "V2-Lite shared down": (2048, 2816),
    "V3 router": (256, 7168),
    "V3 latents": (2112, 7168),
    "V3 shared down": (7168, 2048),
}
ROWS = (1, 8, 32, 64)
BLOCKS = tuple(product((16, 32), (64, 128, 256), (4, 8), (3, 4, 6)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure(name: str, rows: int, candidates: list[Tiling] | None) -> dict[str, Any]:
    outputs, inputs = WEIGHTS[name]
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    weight = torch.randn(outputs, inputs, device="cuda").bfloat16()
    dtype = torch.float32 if "router" in name else torch.bfloat16

    def ours(tiles: Tiling | None = None) -> float:
        return time_us(lambda: linear_triton(x, weight, out_dtype=dtype, tiles=tiles), max_runs=40)

    row = {
        "weight": name,
        "rows": rows,
        "us": round(ours(), 2),
        "torch_us": round(time_us(lambda: torch.mm(x, weight.t(), out_dtype=dtype)), 2),
        "floor_us": round(floor_us(moved_bytes=weight.nbytes, flops=2 * rows * weight.numel()), 2),
    }
    if candidates:
        times = {}
        for tiles in candidates:
            try:
                times[tiles] = ours(tiles)
            except OutOfResources:
                continue
        best = min(times, key=lambda tiles: times[tiles])
        row |= {"best_us": round(times[best], 2), "best": str(best)}
    return row


def main() -> None:
    args = parse_args()
    rows = []
    print(f"{'weight':28} rows       us  torch us    floor  of floor")
    for name, batch in product(WEIGHTS, ROWS):
        block_rows = tiling(batch, 1).block_rows
        candidates = [Tiling(block_rows, *rest) for rest in BLOCKS] if args.sweep else None
        row = measure(name, batch, candidates)
        rows.append(row)
        print(
            f"{name:28} {batch:4d} {row['us']:8.2f} {row['torch_us']:9.2f} {row['floor_us']:8.2f} "
            f"{row['floor_us'] / row['us']:9.1%}  {row.get('best_us', '')} {row.get('best', '')}",
            flush=True,
        )
    record("linear", {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
