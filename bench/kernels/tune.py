"""Measures tilings of matrix products and writes the tables that the worker reads (`worker/kernels/tuned.py`).

    python bench/kernels/tune.py OP --shapes deepseek-v3 [--tp 8] [--ep 8] [--dtype fp8] [--out DIR] [--resume]

OP is `dense` (products with FP8 weights in blocks of 128 x 128), `few-rows` (the same, whose rows are not rounded), `moe`
(fused mixtures of experts) or `all`. `--tp` and
`--ep` take several sizes: all their combinations are tuned in one run. Shapes that occur several times are tuned once.

Candidates are compiled in processes, without the GPU. Those that spill or exceed shared memory are dropped. Then each
candidate is timed in a CUDA graph, briefly, and the best ones again, longer and with other groupings of the programs.
Weights are read from memory, not from L2. For experts the number of rows in a block is the one with the smallest sum of
both products. An entry is null, for the tiles of the code, where no candidate is 2% faster.

Steps of up to 128 rows come first: most steps of a server are. A table is written after each number of rows. `--seconds`
ends a run early, an interrupt keeps the tables, and `--resume` goes on with the numbers of rows that they lack. Without
`--resume` tables of earlier runs are replaced.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
LEAST_GAIN = 0.02  # over the tiles of the code, without which they stay
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
from kernels.tune_problems import (
    DECODE_ROWS,
    DENSE_ROWS,
    E4M3,
    FEW_ROWS,
    MOE_TOKENS,
    Dense,
    FewRows,
    Inputs,
    Job,
    Launch,
    Moe,
    Problem,
    compile_size,
)
from kernels.tune_shapes import MODELS, dense_shapes, divisions, experts_shape
from kernels.tune_space import GROUPS
from record import record

from mla_router.worker.kernels.tuned import TABLES, TunedTile, decode, device_name, encode
from support.sm90 import compile_here


def problems(args: argparse.Namespace) -> list[Problem]:
    """Returns each shape once, those of experts first: they take most of a step."""
    found: list[Problem] = []
    for name, (tp, ep) in product(args.shapes, divisions(args.tp, args.ep)):
        experts = experts_shape(MODELS[name], tp, ep)
        if args.op in ("moe", "all") and experts is not None:
            dtype = E4M3 if args.dtype == "fp8" else torch.bfloat16
            found.append(Moe(experts, dtype, tuple(args.tokens or MOE_TOKENS)))
        for shape in dense_shapes(MODELS[name], tp) if args.dtype == "fp8" else ():
            if args.op in ("few-rows", "all"):
                found.append(FewRows(shape, tuple(args.tokens or FEW_ROWS)))
            if args.op in ("dense", "all"):
                found.append(Dense(shape, tuple(args.tokens or DENSE_ROWS)))
    return list(dict.fromkeys(found))


def compiles(problem: Problem, job: Job) -> bool:
    """Returns whether the kernel compiles without spills and fits into shared memory. Runs in its own process."""
    try:
        reports = compile_here(
            lambda: problem.launch(compile_size(problem, job), job, Inputs("meta")).with_tile(
                job.tile
            )()
        )
        reports[-1].check()
    except (AssertionError, RuntimeError):
        return False
    return True


class Compilations:
    """Compiles candidates in processes, in the order of the sizes, while the GPU measures those that are ready. Their
    kernels are in Triton's cache afterwards."""

    def __init__(self, sizes: list[tuple[Problem, int]], processes: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, mp_context=context)
        self._running: dict[tuple[Problem, Job], Future[bool]] = {}
        for problem, size in sizes:
            # The slowest first: no process ends much later than the others
            for job in sorted(problem.jobs(size), key=lambda job: -job.tile.block_m):
                if (problem, job) not in self._running:
                    self._running[problem, job] = self._pool.submit(compiles, problem, job)

    def fits(self, problem: Problem, size: int) -> set[Job]:
        """Waits for the candidates of a size, and returns those that can be launched."""
        return {job for job in problem.jobs(size) if self._running[problem, job].result()}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def timed(launch: Launch, tile: TunedTile, launches: int, replays: int) -> float:
    """Returns us of one of at least `launches` launches."""
    from kernels.timing import time_graph_us

    launches = max(launches, len(launch.weights))
    return time_graph_us(launch.with_tile(tile), launches=launches, replays=replays)


def fastest(launch: Launch, jobs: Iterable[Job]) -> tuple[Job, float]:
    """Returns the fastest job with its us. All have the same inputs."""
    times = {job: timed(launch, job.tile, 4, 2) for job in jobs}
    best = sorted(times, key=lambda job: times[job])[:3]
    groups = {
        replace(job, tile=msgspec.structs.replace(job.tile, group_m=group))
        for job in best[:1]
        for group in GROUPS
        if job.tile.block_m >= 16 and job.stage != "few rows"  # the others have no groups
    }
    finely = {job: timed(launch, job.tile, 10, 5) for job in (*best, *groups)}
    return min(finely.items(), key=lambda pair: pair[1])


def solve(problem: Problem, size: int, fits: set[Job], inputs: Inputs) -> tuple[list[Job], float]:
    """Returns the fastest tile of each product, and the sum of their us."""
    possible = [job for job in dict.fromkeys(problem.jobs(size)) if job in fits]
    found: list[tuple[list[Job], float]] = []
    for rows in sorted({job.tile.block_m for job in possible}):
        of_rows = [job for job in possible if job.tile.block_m == rows]
        if not isinstance(problem, Moe):
            job, us = fastest(problem.launch(size, of_rows[0], inputs), of_rows)
            found.append(([job], us))
            continue
        found += _pairs(problem, size, of_rows, inputs)
    assert found, f"no candidate for {problem} with {size} rows"
    return min(found, key=lambda pair: pair[1])


def _pairs(
    problem: Problem, size: int, jobs: list[Job], inputs: Inputs
) -> Iterator[tuple[list[Job], float]]:
    """Yields tiles of both products of experts. A quantized result of the first has a scale for each of its tiles, on
    which the second depends."""
    for group in sorted({job.group for job in jobs if job.stage == "down"}):
        first = [job for job in jobs if job.stage == "gate_up"]
        if isinstance(problem, Moe) and problem.dtype == E4M3:
            first = [job for job in first if job.tile.block_n == group]
        second = [job for job in jobs if job.stage == "down" and job.group == group]
        if not first or not second:
            continue
        gate_up, us = fastest(problem.launch(size, first[0], inputs), first)
        down, down_us = fastest(problem.launch(size, second[0], inputs), second)
        yield [gate_up, down], us + down_us


class Tables:
    """The files of one problem, written after each number of rows."""

    def __init__(self, folder: Path, names: tuple[str, ...], *, resume: bool) -> None:
        self._files = [folder / f"{name}.json" for name in names]
        self._tiles: list[dict[int, TunedTile | None]] = [{} for _ in names]
        if resume:
            self._tiles = [decode(f.read_bytes()) if f.is_file() else {} for f in self._files]

    def has(self, size: int) -> bool:
        return all(size in tiles for tiles in self._tiles)

    def add(self, size: int, found: list[TunedTile] | None) -> None:
        """None: the tiles of the code."""
        for index, (file, tiles) in enumerate(zip(self._files, self._tiles, strict=True)):
            tiles[size] = None if found is None else found[index]
            partial = file.with_suffix(".partial")
            partial.write_bytes(encode(tiles))
            partial.replace(file)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("op", choices=("dense", "few-rows", "moe", "all"))
    parser.add_argument("--shapes", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--tp", type=int, nargs="+", default=[1])
    parser.add_argument("--ep", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", choices=("fp8", "bf16"), default="fp8", help="of the weights")
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of rows")
    parser.add_argument("--seconds", type=float, default=600, help="no measurement starts later")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path, default=TABLES, help="folder of the tables")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    end = time.monotonic() + args.seconds
    chosen = problems(args)
    args.out.mkdir(parents=True, exist_ok=True)
    device = "none" if args.compile_only else device_name(torch.device("cuda", 0))
    tables = {
        problem: Tables(args.out, problem.names(device), resume=args.resume) for problem in chosen
    }
    missing = [
        (problem, size)
        for problem in chosen
        for size in problem.sizes
        if not tables[problem].has(size)
    ]
    missing.sort(key=lambda pair: pair[1] > DECODE_ROWS)
    compilations = Compilations(missing, args.processes)
    try:
        if args.compile_only:
            for problem, size in tqdm(missing, "Compiling"):
                found = len(compilations.fits(problem, size))
                print(f"{problem.names(device)[0]} {size:5} rows: {found} candidates")
            return
        measured = list(measure(missing, tables, compilations, device, end))
    finally:
        compilations.close()
    record("tune", {"measured": measured}, args.out / "measured.jsonl")


def measure(
    missing: list[tuple[Problem, int]],
    tables: Mapping[Problem, Tables],
    compilations: Compilations,
    device: str,
    end: float,
) -> Iterator[dict[str, Any]]:
    """Writes the tables. Yields two times for each number of rows: with the tiles found, and with the code's own tiles."""
    progress = tqdm(missing, "Measuring", mininterval=1)
    before, inputs = None, Inputs("cuda")
    for problem, size in progress:
        if problem != before:
            before, inputs = problem, Inputs("cuda")  # frees the weights of the problem before
        fits = compilations.fits(problem, size)
        if time.monotonic() > end:
            progress.write(f"no time for {len(missing) - progress.n} numbers of rows")
            return
        jobs, us = solve(problem, size, fits, inputs)
        rule = problem.rule(size)
        rule_us = sum(timed(problem.launch(size, job, inputs), job.tile, 10, 5) for job in rule)
        is_faster = us < rule_us * (1 - LEAST_GAIN)
        tables[problem].add(size, [job.tile for job in jobs] if is_faster else None)
        name = problem.names(device)[0]
        progress.write(f"{name} {size:5} rows {us:9.2f} us, rule {rule_us:9.2f} us")
        yield {"table": name, "rows": size, "us": round(us, 2), "rule_us": round(rule_us, 2)}


if __name__ == "__main__":
    main()
