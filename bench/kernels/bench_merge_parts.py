"""The merge of the parts of decode attention, for MLA's latents, with all tilings.

    python bench/kernels/bench_merge_parts.py [--out bench/results/merge_parts.jsonl]

The time is that of one of many merges in a CUDA graph, of the same results in L2: in a step they have just been
written. The floor is the time to read them from memory once. `now` is the choice of `merge_tiling`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import astuple
from itertools import product
from pathlib import Path
from typing import Any

import torch

from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule
from mla_router.worker.kernels.attention.decode_tiling import MergeTiling, merge_tiling, tiling
from mla_router.worker.kernels.attention.merge_parts import merge_parts, partial_results
from mla_router.worker.kernels.device import limits

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record
from timing import floor_us, time_graph_us

LATENT = 512
HEADS = 16
# Requests, and parts of each: 132 and 264 are as many as occupy an H200 once
CASES = [(1, 8), (1, 17), (1, 33), (1, 66), (1, 132), (8, 5), (8, 17), (8, 33), (64, 5)]
TILINGS = [
    MergeTiling(columns, parts, warps)
    for columns, parts, warps in product((32, 64, 128, 512), (4, 8, 16, 32, 64), (1, 2, 4, 8))
    if 8 <= columns * parts // (32 * warps) <= 32  # numbers of a thread at a time
]


def measure(requests: int, parts: int) -> dict[str, Any]:
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * parts
    schedule = DecodeSchedule(
        starts,
        first_requests=starts.new_zeros(requests * parts),
        part_size=starts.new_ones(1),
        max_length=1,
        tiling=tiling(HEADS, requests, on=limits(torch.device("cuda"))),
    )
    out = torch.empty(requests, HEADS, LATENT, dtype=torch.bfloat16, device="cuda")
    partial_out, partial_lse = partial_results(schedule, out, HEADS)
    partial_out.normal_()
    partial_lse.normal_()
    # The piece of part p and request r is p + r
    pieces = torch.arange(requests * parts, device="cuda") + (
        torch.arange(requests, device="cuda").repeat_interleave(parts)
    )
    weights = torch.exp2(partial_lse[pieces].double()).view(requests, parts, HEADS, 1)
    values = partial_out[pieces].double().view(requests, parts, HEADS, LATENT)
    expected = (weights * values).sum(1) / weights.sum(1)

    rows = []
    for tiles in dict.fromkeys([merge_tiling(requests * HEADS, LATENT), *TILINGS]):
        out.zero_()
        merge_parts(partial_out, partial_lse, schedule, out, tiles=tiles)
        error = ((out.double() - expected).norm() / expected.norm()).item()
        assert error < 4e-3, f"{tiles}: relative error {error}"

        def one(tiles: MergeTiling = tiles) -> None:
            merge_parts(partial_out, partial_lse, schedule, out, tiles=tiles)

        rows.append({"tiling": astuple(tiles), "us": round(time_graph_us(one), 2)})
    best = sorted(rows, key=lambda row: row["us"])
    return {
        "requests": requests,
        "parts": parts,
        "floor_us": round(floor_us(moved_bytes=values.numel() * 4), 2),
        "now": rows[0],
        "best": best[:5],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = []
    for requests, parts in CASES:
        cases.append(measure(requests, parts))
        for name, value in cases[-1].items():
            for shown in value if isinstance(value, list) else [value]:
                print(f"{name:>16} {shown}", flush=True)
    record("merge_parts", {"heads": HEADS, "cases": cases}, args.out)


if __name__ == "__main__":
    main()
