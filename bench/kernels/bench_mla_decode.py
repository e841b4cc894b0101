"""MLA decode in bf16 at the shapes of V2-Lite (16 heads) and V3 (128, 64 on each of two ranks), beside FlashInfer's fa3 if installed.

    python bench/kernels/bench_mla_decode.py --out bench/results/mla_decode.jsonl
    python bench/kernels/bench_mla_decode.py --sweep [--heads 16] [--batch 1 8]
    python bench/kernels/bench_mla_decode.py --kv-cache-dtype fp8_e4m3 [--sweep]

The floor counts every cached row once and the products of both sums. `us` is with a cold L2, `graph us`
in a CUDA graph of such calls back to back over caches that take turns, as layers do in a step, so that
rows are read from memory; making the schedule, once a step for all layers, is not in them and stands by
itself, and so does the time that the host takes for FlashInfer's plan. FlashInfer is compared in bf16 alone.
`--sweep` times tilings and numbers of parts in such graphs, and the three best with a cold L2, too.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule, decode_schedule
from mla_router.worker.kernels.attention.decode_tiling import Tiling, num_parts, tiling
from mla_router.worker.kernels.attention.mla_decode import mla_decode_torch, mla_decode_triton
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.kv_cache.fp8 import FORMATS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from error import relative_error
from record import record
from timing import floor_us, time_graph_us, time_host_us, time_us

LATENT, ROPE = 512, 64
SCALE = 0.1147
PAGE_SIZE = 64
COLD_BYTES = 200 << 20  # of caches that take turns

# Candidates of a sweep.
CANDIDATES = [
    Tiling(16, 32, 4, 3, 2, 1),
    Tiling(16, 32, 4, 3, 2, 2),
    Tiling(16, 32, 4, 3, 2, 4),
    Tiling(16, 32, 8, 3, 2, 2),
    Tiling(16, 64, 4, 2, 2, 1),
    Tiling(16, 64, 4, 2, 2, 2),
    Tiling(16, 64, 8, 3, 1, 1),
    Tiling(16, 64, 8, 3, 1, 2),
    Tiling(16, 64, 8, 3, 1, 4),
    Tiling(32, 32, 8, 3, 1, 1),
    Tiling(32, 32, 8, 3, 1, 2),
    Tiling(32, 64, 8, 2, 1, 1),
    Tiling(32, 64, 8, 2, 1, 2),
    Tiling(64, 32, 8, 3, 1, 1),
    Tiling(64, 64, 8, 2, 1, 1),
    Tiling(64, 64, 8, 2, 1, 2),
    *(Tiling(rows, 64, warps, 3, 1, hopper=True) for rows in (16, 32) for warps in (4, 8)),
    Tiling(64, 128, 4, 2, 1, hopper=True),
]
# With an FP8 cache, whose blocks take half the memory.
FP8_CANDIDATES = [
    *(Tiling(16, 64, 4, 3, 2, pieces) for pieces in (2, 4, 8)),
    *(Tiling(16, 64, 4, 4, 1, pieces) for pieces in (2, 4)),
    *(Tiling(16, 64, 8, 3, programs, pieces) for programs in (1, 2) for pieces in (2, 4)),
    *(Tiling(16, 32, 4, stages, 2, 4) for stages in (3, 4)),
    *(Tiling(16, 128, 8, stages, 1, 4) for stages in (2, 3)),
    *(Tiling(32, 64, 8, stages, 1, 2) for stages in (2, 3)),
    *(Tiling(32, 32, 8, stages, 1, 2) for stages in (3, 4)),
    *(Tiling(64, tokens, 8, 2, 1, 2) for tokens in (32, 64)),
    Tiling(16, 64, 4, 3, 2, hopper=True),
    Tiling(16, 64, 4, 6, 1, hopper=True),
    Tiling(16, 64, 8, 5, 1, hopper=True),
    *(Tiling(rows, 128, 8, 3, 1, hopper=True) for rows in (16, 32)),
    *(Tiling(rows, 64, 8, 4, 1, hopper=True) for rows in (32, 64)),
    Tiling(64, 128, 4, 2, 1, hopper=True),
]
# Times the number of parts that occupies the GPU once, and the fewest blocks of a part
PARTS = [(1, 1), (1, 2), (1, 4), (2, 1)]


@dataclass(frozen=True)
class Case:
    heads: int
    batch: int
    length: int
    page_size: int = PAGE_SIZE
    queries: int = 1
    kv_cache_dtype: str = "auto"

    @property
    def dtype(self) -> torch.dtype:
        return FORMATS.get(self.kv_cache_dtype, torch.bfloat16)

    @property
    def fp8(self) -> bool:
        return self.dtype in FORMATS.values()

    @property
    def candidates(self) -> list[Tiling]:
        rows = self.heads * self.queries
        tried = FP8_CANDIDATES if self.fp8 else CANDIDATES
        return [tiles for tiles in tried if min(rows, 32) <= tiles.block_rows <= rows]

    @property
    def floor_us(self) -> float:
        rows = self.batch * self.queries * self.heads
        flops = 2 * rows * self.length * (2 * LATENT + ROPE)
        return floor_us(moved_bytes=self.kv_bytes + rows * (2 * LATENT + ROPE) * 2, flops=flops)

    @property
    def flops(self) -> float:
        return 2 * self.batch * self.queries * self.heads * self.length * (2 * LATENT + ROPE)

    @property
    def kv_bytes(self) -> float:
        return self.batch * self.length * (LATENT + ROPE) * self.dtype.itemsize


SMALLER = (8, 4096), (32, 1024)
CASES = [
    *(Case(16, batch, length) for batch in (1, 8, 64, 256) for length in (512, 4096, 32768)),
    Case(16, 32, 1024),
    Case(16, 256, 1024),
    Case(16, 64, 4096, page_size=16),
    Case(16, 64, 4096, page_size=1),
    *(Case(16, 64, 4096, queries=queries) for queries in (2, 4, 8)),
    *(Case(16, *shape, queries=queries) for shape in SMALLER for queries in (2, 4)),
    *(Case(64, *shape) for shape in (*SMALLER, (64, 4096))),
    *(Case(128, *shape) for shape in ((1, 4096), *SMALLER, (64, 4096), (128, 1024), (256, 1024))),
    Case(128, 64, 4096, queries=2),
]


class Inputs:
    """Random queries, and a cache whose pages lie in random order."""

    def __init__(self, case: Case) -> None:
        self.case = case
        pages = -(-case.length // case.page_size)
        num_pages = case.batch * pages + 1
        copies = math.ceil(COLD_BYTES / case.kv_bytes)
        shape = copies, num_pages, case.page_size, LATENT + ROPE
        self.caches = torch.randn(*shape, dtype=torch.bfloat16, device="cuda").to(case.dtype)
        self.cache = self.caches[0]
        order = torch.randperm(num_pages - 1, device="cuda").int() + 1
        self.page_table = order.view(case.batch, pages)
        self.slots = torch.arange(case.batch, device="cuda")
        self.lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device="cuda")
        q = torch.randn(
            case.batch * case.queries,
            case.heads,
            LATENT + ROPE,
            dtype=torch.bfloat16,
            device="cuda",
        )
        self.q_latent, self.q_pe = (part.contiguous() for part in q.split([LATENT, ROPE], dim=-1))

    def schedule(self, chosen: Tiling, parts: int) -> DecodeSchedule:
        return decode_schedule(
            self.lengths, max_length=self.case.length, tiling=chosen, num_parts=parts
        )

    def parts(self, chosen: Tiling) -> int:
        return num_parts(chosen, self.case.heads, self.case.queries, self.lengths.device)

    def ours(self, schedule: DecodeSchedule) -> Callable[[], torch.Tensor]:
        """Returns a function. Each call uses the next cache, the first call the first one."""
        torch.cuda.synchronize()  # the schedule is settled: without that its first use may come too early
        turn = cycle(self.caches)
        return lambda: mla_decode_triton(
            self.q_latent,
            self.q_pe,
            next(turn),
            self.page_table,
            self.slots,
            self.lengths,
            schedule,
            scale=SCALE,
            settled=True,  # as a step does
            queries=self.case.queries,
        )

    def graph_us(self, attend: Callable[[], torch.Tensor]) -> float:
        copies = len(self.caches)
        return time_graph_us(attend, launches=copies * math.ceil(20 / copies))

    def expected(self) -> torch.Tensor:
        return mla_decode_torch(
            self.q_latent,
            self.q_pe,
            self.cache,
            self.page_table,
            self.slots,
            self.lengths,
            max_length=self.case.length,
            scale=SCALE,
            queries=self.case.queries,
        )

    def flashinfer(self) -> tuple[Callable[[], None], Callable[[], torch.Tensor]] | None:
        """Returns FlashInfer's plan on the host and its run. None if it is not installed, or if the cache is FP8."""
        if self.case.fp8:
            return None
        try:
            from flashinfer.mla import BatchMLAPagedAttentionWrapper
        except ImportError:
            return None
        case = self.case
        workspace = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        starts = torch.arange(case.batch + 1, dtype=torch.int32)
        lengths = self.lengths.cpu()

        def plan() -> None:
            wrapper.plan(
                starts * case.queries,
                starts * self.page_table.shape[1],
                self.page_table.flatten(),
                lengths,
                case.heads,
                LATENT,
                ROPE,
                case.page_size,
                case.queries > 1,
                SCALE,
                torch.bfloat16,
                torch.bfloat16,
            )

        plan()
        turn = cycle([cache.split([LATENT, ROPE], dim=-1) for cache in self.caches])
        return plan, lambda: wrapper.run(self.q_latent, self.q_pe, *next(turn))


def measure(case: Case) -> dict[str, Any]:
    inputs = Inputs(case)
    on = limits(torch.device("cuda"))
    chosen = tiling(case.heads, case.batch, case.queries, fp8=case.fp8, on=on)
    parts = inputs.parts(chosen)
    schedule = inputs.schedule(chosen, parts)
    ours = inputs.ours(schedule)
    plan, theirs = inputs.flashinfer() or (None, None)
    difference = relative_error(inputs.ours(schedule)(), theirs()) if theirs else None
    us = time_us(ours)
    return {
        "heads": case.heads,
        "batch": case.batch,
        "length": case.length,
        "page_size": case.page_size,
        "queries": case.queries,
        "kv_cache_dtype": case.kv_cache_dtype,
        "us": us,
        "graph_us": inputs.graph_us(ours),
        "schedule_graph_us": time_graph_us(lambda: inputs.schedule(chosen, parts)),
        "flashinfer_us": time_us(theirs) if theirs else None,
        "flashinfer_graph_us": inputs.graph_us(theirs) if theirs else None,
        "flashinfer_plan_host_us": time_host_us(plan) if plan else None,
        "flashinfer_difference": difference,
        "tb_per_s": case.kv_bytes / us / 1e6,
        "tflops": case.flops / us / 1e6,
        "floor_us": case.floor_us,
    }


def sweep(case: Case, candidates: list[Tiling]) -> list[dict[str, Any]]:
    """Every candidate with every number of parts, the fastest first."""
    inputs = Inputs(case)
    rows = []
    for chosen in candidates:
        for times, min_blocks in PARTS:
            tried = replace(chosen, min_blocks=min_blocks)
            parts = inputs.parts(tried) * times
            schedule = inputs.schedule(tried, parts)
            us = inputs.graph_us(inputs.ours(schedule))
            rows.append({"graph_us": us, "tiling": astuple(tried), "parts": parts})
    rows.sort(key=lambda row: row["graph_us"])
    for row in rows[:3]:
        schedule = inputs.schedule(Tiling(*row["tiling"]), row["parts"])
        row["us"] = time_us(inputs.ours(schedule), budget_ms=20)
    return rows


def error(case: Case, chosen: Tiling) -> float | None:
    """Against torch; None if the GPU has not the resources. What is compiled here comes from
    Triton's cache in other processes."""
    inputs = Inputs(case)
    try:
        got = inputs.ours(inputs.schedule(chosen, inputs.parts(chosen)))()
    except OutOfResources:
        return None
    return relative_error(got, inputs.expected())


def print_case(row: dict[str, Any]) -> None:
    theirs = " ".join(
        f"{row[name]:8.1f}" if row[name] else "       -"
        for name in ("flashinfer_us", "flashinfer_graph_us", "flashinfer_plan_host_us")
    )
    print(
        f"{row['heads']:5} {row['queries']:3} {row['batch']:5} {row['length']:6} "
        f"{row['page_size']:4} {row['us']:9.1f} {row['graph_us']:9.1f} "
        f"{row['schedule_graph_us']:8.1f} {theirs} {row['tb_per_s']:6.2f} {row['tflops']:6.0f} "
        f"{row['floor_us']:8.1f} {row['floor_us'] / row['us']:6.0%}",
        flush=True,
    )


def run_cases(cases: list[Case]) -> dict[str, Any]:
    print(
        "heads   q batch length page        us  graph us schedule flashinf fi graph  fi plan   TB/s"
        "     TF    floor  floor"
    )
    rows = []
    for case in cases:
        rows.append(measure(case))
        print_case(rows[-1])
    if rows[0]["flashinfer_us"] is None:
        print("FlashInfer is not installed, or the cache is FP8: not compared")
    return {"rows": rows}


def run_sweep(cases: list[Case]) -> dict[str, Any]:
    """Compiles and checks at a small size in many processes, then times one by one."""
    small = {case: replace(case, batch=8, length=512) for case in cases}
    tried = [(case, chosen) for case in dict.fromkeys(small.values()) for chosen in case.candidates]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(tried), os.cpu_count() or 1), mp_context=spawn) as pool:
        errors = dict(zip(tried, pool.map(error, *zip(*tried, strict=True)), strict=True))
    for (case, chosen), found in errors.items():
        if found is None or not found < 1e-2:
            print(f"left out: {chosen} at {case}: relative error {found}")

    results = []
    for case in cases:
        usable = [
            chosen
            for chosen in case.candidates
            if (found := errors[small[case], chosen]) is not None and found < 1e-2
        ]
        rows = sweep(case, usable)
        results.append(asdict(case) | {"rows": rows})
        print(f"{case}: floor {case.floor_us:.1f} us")
        for row in rows[:3]:
            print(
                f"    {row['graph_us']:8.1f} us ({row['us']:.1f} cold)  {row['tiling']}  "
                f"{row['parts']} parts"
            )
        best = {row["tiling"][:6]: row["graph_us"] for row in reversed(rows)}
        print(
            "    best of each:", *(f"{tiles}: {us:.1f}" for tiles, us in best.items()), flush=True
        )
    return {"cases": results}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--heads", type=int, nargs="+", help="only these")
    parser.add_argument("--batch", type=int, nargs="+", help="only these")
    parser.add_argument("--kv-cache-dtype", choices=("auto", *FORMATS), default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    cases = [
        replace(case, kv_cache_dtype=args.kv_cache_dtype)
        for case in CASES
        if case.heads in (args.heads or [case.heads]) and case.batch in (args.batch or [case.batch])
    ]
    swept = [case for case in cases if case.page_size >= 16]
    result = run_sweep(swept) if args.sweep else run_cases(cases)
    record("mla_decode_sweep" if args.sweep else "mla_decode", result, args.out)


if __name__ == "__main__":
    main()
