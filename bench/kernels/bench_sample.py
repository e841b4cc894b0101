"""The time of sampling on the device, kernel by kernel, and the time to read the logits once.

    python bench/kernels/bench_sample.py [--vocab-size 102400] [--rows 1 32 256] [--sweep] [--out FILE]

`torch` is the torch function on the same GPU, which sorts for top_k and top_p and waits for the device. `--sweep` also
times other blocks and numbers of warps. `bench/serving/sampling.py` measures the whole sampling of a step, and the
host's time.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.timing import floor_us, time_graph_us, time_us
from record import record

from mla_router.worker.kernels.sampling.sample import sample_torch, sample_triton
from mla_router.worker.kernels.sampling.top_threshold import (
    top_threshold_torch,
    top_threshold_triton,
)

WARPS, BLOCKS = (4, 8, 16, 32), (2048, 4096, 8192)


@dataclass(frozen=True)
class Case:
    name: str
    triton: Callable[..., Any]
    torch: Callable[[], Any]
    sweep: tuple[dict[str, int], ...]


def cases(logits: torch.Tensor) -> Iterator[Case]:
    one = torch.ones(len(logits), device="cuda")
    row = torch.arange(len(logits), device="cuda")
    warps = tuple({"num_warps": n} for n in WARPS)
    for name, temperature in (("greedy", 0.0), ("temperature", 0.8)):
        drawn = torch.empty_like(row), torch.empty_like(row, dtype=torch.int32)
        inputs = (logits, row, row.int(), temperature * one, row, None, *drawn)
        yield Case(
            name,
            lambda *, inputs=inputs, **how: sample_triton(*inputs, **how),
            lambda inputs=inputs: sample_torch(*inputs),
            warps,
        )
    tiles = tuple({"num_warps": n, "block": b} for n, b in itertools.product(WARPS, BLOCKS))
    for name, top_k, top_p in (("top_k", 50, 1.0), ("top_p", 0, 0.95), ("both", 50, 0.95)):
        asked = (logits, 0.8 * one, (top_k * one).long(), top_p * one, 0 * one)
        yield Case(
            name,
            lambda *, asked=asked, **how: top_threshold_triton(*asked, **how),
            lambda asked=asked: top_threshold_torch(*asked),
            tiles,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocab-size", type=int, default=102_400)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(1)
    lines = []
    for dtype, rows in itertools.product((torch.float32, torch.bfloat16), args.rows):
        logits = (4 * torch.randn(rows, args.vocab_size, device="cuda")).to(dtype)
        for case in cases(logits):
            for how in ({}, *case.sweep) if args.sweep else ({},):
                line = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": rows,
                    "case": case.name,
                    "how": " ".join(f"{key}={value}" for key, value in how.items()) or "chosen",
                    "graph_us": round(time_graph_us(lambda c=case, h=how: c.triton(**h)), 1),
                    "cold_us": round(time_us(lambda c=case, h=how: c.triton(**h)), 1),
                    "torch_us": "" if how else round(time_us(case.torch), 1),
                    "floor_us": round(floor_us(moved_bytes=logits.nbytes), 1),
                }
                if not lines:
                    print("  ".join(f"{key:>12}" for key in line))
                print("  ".join(f"{value:>12}" for value in line.values()), flush=True)
                lines.append(line)
    record("sample", {"config": {"vocab_size": args.vocab_size}, "rows": lines}, args.out)


if __name__ == "__main__":
    main()
