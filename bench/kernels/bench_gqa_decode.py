"""Grouped-query decode in bf16 at the shapes of Llama 3 8B, Llama 3.2 1B, V2-Lite with keys and values of all heads, and
both kinds of Gemma 2's layers, beside FlashInfer's kernels on tensor cores if installed (keys as wide as values).

    python bench/kernels/bench_gqa_decode.py --out bench/results/gqa_decode.jsonl
    python bench/kernels/bench_gqa_decode.py --sweep

The floor counts every key and value within the window once. `us` is with a cold L2. `graph us` is in a CUDA graph of consecutive
calls over different caches, as the layers of a step, so that rows are read from memory. Neither includes the schedule,
which is made once a step for all layers, nor FlashInfer's plan on the host. `--sweep` times tilings and numbers of parts in such graphs.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.error import relative_error
from kernels.timing import floor_us, time_graph_us, time_host_us, time_us
from record import record

from kernels import flashinfer_gqa
from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule, decode_schedule
from mla_router.worker.kernels.attention.decode_tiling import Tiling, gqa_tiling, num_parts
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode_torch, gqa_decode_triton
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.kv_cache.gqa_rows import keys_and_values

SCALE = 0.0884
COLD_BYTES = 200 << 20  # of caches that take turns

# Candidates of a sweep.
CANDIDATES = [
    Tiling(16, tokens, warps, stages, programs, min_blocks=2)
    for tokens, warps, stages, programs in (
        (16, 4, 4, 4),
        (32, 2, 3, 4),
        (32, 4, 2, 4),
        (32, 4, 3, 2),
        (32, 4, 3, 3),
        (32, 4, 3, 4),
        (32, 4, 4, 3),
        (32, 8, 3, 2),
        (64, 4, 2, 3),
        (64, 4, 2, 4),
        (64, 4, 3, 2),
        (64, 4, 3, 3),
        (64, 4, 4, 2),
        (64, 8, 3, 2),
        (128, 4, 2, 2),
        (128, 8, 2, 2),
        (128, 8, 3, 1),
    )
]


@dataclass(frozen=True)
class Case:
    model: str
    heads: int
    num_kv_heads: int
    width: int
    v_head_dim: int
    batch: int
    length: int
    page_size: int = 64
    window: int | None = None
    softcap: float | None = None

    @property
    def row(self) -> int:
        return self.num_kv_heads * (self.width + self.v_head_dim)

    @property
    def kv_bytes(self) -> float:
        return self.batch * min(self.length, self.window or self.length) * self.row * 2


def llama_3_8b(batch: int, length: int, page_size: int = 64) -> Case:
    return Case("Llama 3 8B", 32, 8, 128, 128, batch, length, page_size)


def llama_3_2_1b(batch: int, length: int) -> Case:
    return Case("Llama 3.2 1B", 32, 8, 64, 64, batch, length)


def v2_lite(batch: int, length: int) -> Case:
    return Case("V2-Lite expanded", 16, 16, 192, 128, batch, length)


def gemma_2_9b(batch: int, length: int, window: int | None = 4096) -> Case:
    return Case("Gemma 2 9B", 16, 8, 256, 256, batch, length, window=window, softcap=50.0)


def qwen_2_7b(batch: int, length: int) -> Case:
    return Case("Qwen2 7B", 28, 4, 128, 128, batch, length)


CASES = [
    *(llama_3_8b(batch, length) for batch in (1, 8, 64, 256) for length in (512, 4096)),
    llama_3_8b(1, 32768),
    llama_3_8b(8, 32768),
    llama_3_8b(64, 4096, page_size=16),
    llama_3_8b(64, 4096, page_size=1),
    *(llama_3_2_1b(*shape) for shape in ((1, 4096), (64, 4096), (256, 1024))),
    *(v2_lite(*shape) for shape in ((1, 4096), (8, 4096), (32, 1024), (64, 4096))),
    *(
        gemma_2_9b(batch, length, window)
        for batch in (1, 8, 64)
        for length, window in ((1024, None), (8192, None), (8192, 4096))
    ),
]
SWEPT = [  # in pages of the engine's size
    replace(case, page_size=16)
    for case in (
        *(llama_3_8b(batch, 1024) for batch in (1, 8, 32, 64, 128)),
        *(llama_3_8b(batch, 8192) for batch in (1, 8, 32)),
        *(qwen_2_7b(*shape) for shape in ((1, 1024), (32, 1024), (128, 1024), (8, 8192))),
        *(gemma_2_9b(batch, 8192, window) for batch in (1, 8, 32) for window in (None, 4096)),
        gemma_2_9b(32, 1024, None),
    )
]


class Inputs:
    """Random queries, and caches whose pages lie in random order."""

    def __init__(self, case: Case) -> None:
        self.case = case
        pages = -(-case.length // case.page_size)
        num_pages = case.batch * pages + 1
        copies = math.ceil(COLD_BYTES / case.kv_bytes)
        self.caches = torch.randn(
            copies, num_pages, case.page_size, case.row, dtype=torch.bfloat16, device="cuda"
        )
        order = torch.randperm(num_pages - 1, device="cuda").int() + 1
        self.page_table = order.view(case.batch, pages)
        self.slots = torch.arange(case.batch, device="cuda")
        self.lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device="cuda")
        shape = case.batch, case.heads + 2 * case.num_kv_heads, case.width
        self.q = torch.randn(shape, dtype=torch.bfloat16, device="cuda")[:, : case.heads]
        self.out = self.q.new_empty(case.batch, case.heads, case.v_head_dim)

    def chosen(self) -> Tiling:
        """Returns the engine's tiling."""
        case = self.case
        share, width = case.heads // case.num_kv_heads, case.width + case.v_head_dim
        return gqa_tiling(
            share,
            width,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.width,
            on=limits(self.lengths.device),
        )

    def schedule(self, chosen: Tiling, times: int = 1) -> DecodeSchedule:
        """Returns a schedule with `times` as many parts as programs run at a time."""
        case = self.case
        parts = num_parts(
            chosen, case.heads, 1, self.lengths.device, num_kv_heads=case.num_kv_heads
        )
        return decode_schedule(
            self.lengths,
            max_length=case.length,
            tiling=chosen,
            num_parts=parts * times,
            window=case.window,
        )

    def call(self, schedule: DecodeSchedule) -> Callable[[], None]:
        """Returns a function. Each call uses the next cache, the first call the first one."""
        turn = cycle(self.caches)
        return lambda: gqa_decode_triton(
            self.q,
            next(turn),
            self.page_table,
            self.slots,
            self.lengths,
            schedule,
            self.out,
            scale=SCALE,
            softcap=self.case.softcap,
        )

    def graph_us(self, call: Callable[[], object]) -> float:
        copies = len(self.caches)
        return time_graph_us(call, launches=copies * math.ceil(20 / copies))

    def flashinfer(self, schedule: DecodeSchedule) -> dict[str, float]:
        """Returns FlashInfer's times, and its difference from our result. Empty if it is not installed."""
        case = self.case
        if case.width != case.v_head_dim or not flashinfer_gqa.installed():
            return {}
        turn = cycle(self.caches)
        plan, run = flashinfer_gqa.decode(
            self.q,
            lambda: keys_and_values(next(turn), case.width, case.v_head_dim),
            self.page_table,
            self.lengths,
            scale=SCALE,
            window=case.window,
            softcap=case.softcap,
        )
        turn = cycle(self.caches)  # from the first cache on, which our call reads
        theirs = run()
        self.call(schedule)()
        return {
            "flashinfer_us": time_us(run),
            "flashinfer_graph_us": self.graph_us(run),
            "flashinfer_plan_host_us": time_host_us(plan),
            "flashinfer_difference": relative_error(theirs, self.out),
        }

    def error(self, schedule: DecodeSchedule) -> float:
        """Returns the largest error of the first few requests, compared with torch."""
        self.call(schedule)()
        few = min(self.case.batch, 4)
        expected = torch.empty_like(self.out[:few])
        gqa_decode_torch(
            self.q[:few],
            self.caches[0],
            self.page_table,
            self.slots[:few],
            self.lengths[:few],
            expected,
            max_length=self.case.length,
            scale=SCALE,
            window=self.case.window,
            softcap=self.case.softcap,
        )
        return relative_error(self.out[:few], expected)


def measure(case: Case) -> dict[str, Any]:
    inputs = Inputs(case)
    schedule = inputs.schedule(inputs.chosen())
    ours = inputs.call(schedule)
    us = time_us(ours)
    return (
        asdict(case)
        | {
            "us": us,
            "graph_us": inputs.graph_us(ours),
            "error": inputs.error(schedule),
            "parts": schedule.num_parts,
            "tb_per_s": case.kv_bytes / us / 1e6,
            "floor_us": floor_us(moved_bytes=case.kv_bytes),
        }
        | inputs.flashinfer(schedule)
    )


def run_cases() -> dict[str, Any]:
    print(
        "           model batch length window page parts        us  graph us    floor  floor  TB/s   error  FlashInfer, difference"
    )
    rows = []
    for case in CASES:
        row = measure(case)
        rows.append(row)
        print(
            f"{case.model:>16} {case.batch:5} {case.length:6} {case.window or '-':>6} "
            f"{case.page_size:4} {row['parts']:5} "
            f"{row['us']:9.1f} {row['graph_us']:9.1f} {row['floor_us']:8.1f} "
            f"{row['floor_us'] / row['graph_us']:6.0%} {row['tb_per_s']:5.2f} {row['error']:.1e}"
            + "".join(
                f" {row[key]:.3g}"
                for key in ("flashinfer_graph_us", "flashinfer_difference")
                if key in row
            ),
            flush=True,
        )
    return {"rows": rows}


def small_error(case: Case, chosen: Tiling) -> float | None:
    """None if the GPU has not the resources. What is compiled here comes from Triton's cache in other
    processes."""
    inputs = Inputs(replace(case, batch=4, length=512))
    try:
        return inputs.error(inputs.schedule(chosen))
    except OutOfResources:
        return None


def run_sweep() -> dict[str, Any]:
    """Compiles and checks at a small size in many processes, then times one by one."""
    small = {case: replace(case, batch=1, length=1) for case in SWEPT}
    tried = [(case, chosen) for case in dict.fromkeys(small.values()) for chosen in CANDIDATES]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=spawn) as pool:
        errors = dict(zip(tried, pool.map(small_error, *zip(*tried, strict=True)), strict=True))
    for (case, chosen), found in errors.items():
        if found is None or not found < 1e-2:
            print(f"left out: {chosen} at {case}: relative error {found}")

    results = []
    for case in SWEPT:
        inputs, rows = Inputs(case), []
        for chosen in CANDIDATES:
            found = errors[small[case], chosen]
            if found is None or not found < 1e-2:
                continue
            for times, min_blocks in ((1, 1), (1, 2), (2, 1)):
                tiles = replace(chosen, min_blocks=min_blocks)
                schedule = inputs.schedule(tiles, times)
                us = inputs.graph_us(inputs.call(schedule))
                rows.append({"us": us, "tiling": astuple(tiles), "parts": schedule.num_parts})
        rows.sort(key=lambda row: row["us"])
        results.append(asdict(case) | {"rows": rows})
        chosen = inputs.schedule(inputs.chosen())
        print(
            f"{case}: floor {floor_us(moved_bytes=case.kv_bytes):.1f} us, chosen {inputs.graph_us(inputs.call(chosen)):.1f} us "
            f"{astuple(chosen.tiling)} {chosen.num_parts} parts"
        )
        for row in rows[:5]:
            print(f"    {row['us']:8.1f} us  {row['tiling']}  {row['parts']} parts", flush=True)
    return {"cases": results}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    result = run_sweep() if args.sweep else run_cases()
    record("gqa_decode_sweep" if args.sweep else "gqa_decode", result, args.out)


if __name__ == "__main__":
    main()
