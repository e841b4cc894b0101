"""Measures tilings of the experts' kernels and writes the table that the worker reads.

    python bench/kernels/tune_moe.py [--model v2-lite] [--seconds 200] [--tokens ...] [--out FILE]

First all candidates are compiled, in parallel and without the GPU. Candidates that spill or exceed shared memory are
dropped. Then each kernel is timed with each candidate, for each number of tokens and of rows in a block. The best ones
are timed again, longer, with other groupings of the programs. The number of rows is the one with the fastest whole op.
The table is written after each number of tokens, so a run that `--seconds` ends keeps its results.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
from kernels.moe_cases import (
    MODELS,
    Case,
    MoeModel,
    random_case,
    random_layers,
    time_layers_us,
)
from kernels.moe_space import Stage, candidates, rows_for
from kernels.timing import time_us

from mla_router.worker.kernels.moe.align import Blocks, blocks_for, empty_blocks
from mla_router.worker.kernels.moe.down_gemm import down_blocks
from mla_router.worker.kernels.moe.experts import moe_experts_triton
from mla_router.worker.kernels.moe.gate_up_gemm import Gated, gate_up_blocks
from mla_router.worker.kernels.moe.gemv import down_pairs, gate_up_pairs
from mla_router.worker.kernels.moe.tiling import MoeTiling, Tile, table_path
from support.sm90 import compile_here

# The most frequent sizes first: decode, then prefill, then the sizes between
TOKENS = (1, 32, 128, 8, 8192, 2048, 64, 256, 4, 16, 2, 512, 1024, 4096)
GROUPS = (1, 2, 4, 16, 32)  # beside the 8 that candidates have
Space = dict[tuple[Stage, int], list[Tile]]


@dataclass(frozen=True)
class Launch:
    """One kernel with its inputs in the op."""

    case: Case
    weight: Tensor
    blocks: Blocks | None
    gated: Tensor | None  # of the down projection

    def __call__(self, tile: Tile) -> Tensor:
        x, weights, ids = self.case.x, self.case.weights, self.case.ids
        if self.blocks is None:
            if self.gated is None:
                return gate_up_pairs(x, self.weight, ids, tile)
            return down_pairs(self.gated, self.weight, weights, ids, tile)
        if self.gated is None:
            return gate_up_blocks(x, self.weight, self.blocks, tile).rows
        return down_blocks(Gated(self.gated), self.weight, self.blocks, tile)


def compiles(name: str, stage: Stage, rows: int, tile: Tile) -> bool:
    """Returns whether the kernel compiles without spills. Runs in its own process."""
    model = MODELS[name]
    shape, top_k = model.shape, model.top_k

    def meta(*sizes: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    ids = meta(64, top_k, dtype=torch.int32)
    weights = meta(64, top_k, dtype=torch.float32)
    case = Case(meta(64, shape.hidden), weights, weights, ids, shape.experts)
    blocks = None if rows == 1 else empty_blocks(ids, shape.experts, rows)
    gate_up = meta(shape.experts, 2 * shape.width, shape.hidden)
    down = meta(shape.experts, shape.hidden, shape.width)
    gated = meta(ids.numel() if blocks is None else blocks.intermediate_rows, shape.width)
    launch = (
        Launch(case, gate_up, blocks, None)
        if stage == "gate_up"
        else Launch(case, down, blocks, gated)
    )
    try:
        (report,) = compile_here(lambda: launch(tile))
        report.check()
    except (AssertionError, RuntimeError):
        return False
    return True


def compiled(model: MoeModel, processes: int) -> Space:
    jobs = [
        (stage, rows, tile)
        for stage in ("gate_up", "down")
        for rows in (1, 16, 32, 64, 128)
        for tile in candidates(stage, rows, model.shape)
    ]
    # The slowest compilations first, so that no process runs alone at the end.
    jobs.sort(key=lambda job: -job[1])
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        fits = list(pool.map(compiles, *zip(*[(model.name, *job) for job in jobs], strict=True)))
    space: Space = {}
    for (stage, rows, tile), fit in zip(jobs, fits, strict=True):
        if fit:
            space.setdefault((stage, rows), []).append(tile)
    print(f"{sum(fits)} of {len(jobs)} candidates fit", flush=True)
    return space


def fastest(launch: Launch, tiles: list[Tile]) -> tuple[Tile, float]:
    """Returns the tile and its time in us."""

    def timed(tile: Tile, budget_ms: float) -> float:
        return time_us(lambda: launch(tile), budget_ms=budget_ms, max_runs=50)

    best = sorted(tiles, key=lambda tile: timed(tile, 3))[:3]
    if launch.blocks is not None:
        best = [replace(tile, group_m=group) for tile in best for group in (*GROUPS, tile.group_m)]
    return min(((tile, timed(tile, 10)) for tile in best), key=lambda pair: pair[1])


def tuned(case: Case, layers: list[tuple[Tensor, Tensor]], space: Space) -> MoeTiling:
    gate_up, down = layers[0]
    found: list[tuple[float, MoeTiling]] = []
    tokens, top_k = case.ids.shape
    for rows in rows_for(tokens, top_k, len(gate_up)):
        blocks = None if rows == 1 else blocks_for(case.ids, len(gate_up), rows)
        first = Launch(case, gate_up, blocks, None)
        tile, us = fastest(first, space["gate_up", rows])
        second = Launch(case, down, blocks, first(tile))
        down_tile, down_us = fastest(second, space["down", rows])
        tiling = MoeTiling(rows=rows, gate_up=tile, down=down_tile)
        whole = time_layers_us(
            layers,
            lambda *weights, tiling=tiling: moe_experts_triton(
                case.x, *weights, case.weights, case.ids, tiling=tiling
            ),
        )
        found.append((whole, tiling))
        print(f"{tokens:5} tokens: {us:7.1f} + {down_us:7.1f} us, {whole:7.1f} whole: {tiling}")
    return min(found, key=lambda pair: pair[0])[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="v2-lite")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--out", type=Path, help="by default where the worker looks for it")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    model = MODELS[args.model]
    space = compiled(model, args.processes)
    print(f"compiled, {end - time.monotonic():.0f} s left", flush=True)
    if args.compile_only:
        return
    out = args.out or table_path(torch.cuda.get_device_name(), model.shape)
    out.parent.mkdir(parents=True, exist_ok=True)
    layers = random_layers(model)
    table: dict[int, MoeTiling] = {}
    for tokens in args.tokens:
        if time.monotonic() > end:
            print(f"no time for {tokens} tokens")
            continue
        table[tokens] = tuned(random_case(model, tokens), layers, space)
        ordered = dict(sorted(table.items()))
        out.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    print(f"{out}, {end - time.monotonic():.0f} s left", flush=True)


if __name__ == "__main__":
    main()
