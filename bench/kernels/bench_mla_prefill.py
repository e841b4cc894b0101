"""Prefill attention of DeepSeek's heads (head_dim 192 and 128) in bf16, and the kernels that move its keys.

    python bench/kernels/bench_mla_prefill.py [--sweep] [--out bench/results/mla_prefill.jsonl]

`--sweep` also times other tilings of our kernel. FlashInfer's fa3 is included if it is installed. It reads concatenated
keys; the time to make them is not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.timing import floor_us, time_us
from record import record

from kernels import flashinfer_gqa
from mla_router.worker.kernels.attention.merge_states import merge_states
from mla_router.worker.kernels.attention.mla_prefill import mla_prefill
from mla_router.worker.kernels.attention.prefill_work import PrefillWork, prefill_tables
from mla_router.worker.kernels.attention.ragged_attention.kernel import ragged_attention_triton
from mla_router.worker.kernels.attention.ragged_attention.tiling import Tiling
from mla_router.worker.kernels.kv_cache.gather import kv_gather

NOPE, ROPE, VALUE = 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5


@dataclass(frozen=True)
class Case:
    name: str
    heads: int
    extents: list[tuple[int, int]]

    @property
    def flops(self) -> float:
        pairs = sum(n * (s - n) + n * (n + 1) / 2 for n, s in self.extents)
        return 2 * (NOPE + ROPE + VALUE) * self.heads * pairs


CASES = [
    Case("1 x 1k", 16, [(1024, 1024)]),
    Case("512", 16, [(512, 512)]),
    Case("2k", 16, [(2048, 2048)]),
    Case("8 x 1k", 16, [(1024, 1024)] * 8),
    Case("2 x 4k", 16, [(4096, 4096)] * 2),
    Case("8k", 16, [(8192, 8192)]),
    Case("4k", 128, [(4096, 4096)]),
    Case("8 x 64 after 4k", 16, [(64, 4160)] * 8),
    Case("1 x 2k after 14k", 16, [(2048, 16384)]),
    Case("32 x 100..1000", 16, [(n, n) for n in range(100, 1060, 30)]),
]
# Rows of queries of a program, and how it walks over the keys
TILINGS = [
    (128, Tiling(64, 8, 2)),
    (128, Tiling(64, 8, 3)),
    (128, Tiling(32, 8, 3)),
    (128, Tiling(128, 8, 2)),
    (64, Tiling(64, 4, 2)),
    (64, Tiling(64, 4, 3)),
    (64, Tiling(32, 4, 3)),
]


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    kv: Tensor
    k_pe: Tensor

    @classmethod
    def of(cls, case: Case) -> Inputs:
        n, s = (sum(column) for column in zip(*case.extents, strict=True))

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

        return cls(
            randn(n, case.heads, NOPE + ROPE),
            randn(s, case.heads, NOPE + VALUE),
            randn(s, 512 + ROPE)[:, 512:],
        )


def other_blocks(case: Case, rows: int) -> PrefillWork:
    """`PrefillWork.on`, with blocks of `rows` queries."""
    tables = prefill_tables(case.extents, heads=case.heads, block_queries=rows)
    key_starts, query_blocks = (
        torch.from_numpy(table).cuda() for table in (tables.key_starts, tables.query_blocks)
    )
    return PrefillWork(tables.extents, tables.causal, rows, key_starts, query_blocks)


def flashinfer_run(case: Case, inputs: Inputs) -> Callable[[], object] | None:
    if not flashinfer_gqa.installed():
        return None
    k_pe = inputs.k_pe[:, None].expand(-1, case.heads, -1)
    k = torch.cat((inputs.kv[..., :NOPE], k_pe), dim=-1)
    v = inputs.kv[..., NOPE:].contiguous()
    return flashinfer_gqa.prefill(inputs.q, k, v, case.extents, scale=SCALE)


def measure(case: Case, *, sweep: bool) -> list[dict[str, Any]]:
    inputs, rows = Inputs.of(case), []
    q, kv, k_pe = inputs.q, inputs.kv, inputs.k_pe
    work = PrefillWork.on("cuda", case.extents, heads=case.heads)
    ways: dict[str, Callable[[], object] | None] = {
        "ours": lambda: mla_prefill(q, kv, k_pe, work, scale=SCALE),
        "flashinfer fa3": flashinfer_run(case, inputs),
    }

    def tiled(block_queries: int, tiles: Tiling) -> Callable[[], object]:
        own = other_blocks(case, block_queries)
        k, v = kv[..., :NOPE], kv[..., NOPE:]
        return lambda: ragged_attention_triton(q, k, v, k_pe, own, scale=SCALE, tiles=tiles)

    if sweep:
        for block_queries, tiles in TILINGS:
            name = f"{block_queries} x {tiles.block_keys}, {tiles.num_warps} warps, "
            ways[name + f"{tiles.num_stages} stages"] = tiled(block_queries, tiles)
    floor = floor_us(flops=case.flops)
    for name, run in ways.items():
        if run is None:
            continue
        us = time_us(run, budget_ms=40)
        print(
            f"{case.name:18} h{case.heads:<4} {name:28} {us:9.1f} us {case.flops / us / 1e6:6.0f} TF"
            f" {floor:8.1f} us floor {100 * floor / us:4.0f}%",
            flush=True,
        )
        rows.append({"case": case.name, "heads": case.heads, "kernel": name, "us": round(us, 2)})
        rows[-1] |= {"tflops": round(case.flops / us / 1e6, 1), "floor_us": round(floor, 2)}
    return rows


def measure_movers() -> list[dict[str, Any]]:
    """kv_gather and merge_states, bound by memory."""
    cache = torch.randn(4096, 64, 576, dtype=torch.bfloat16, device="cuda")
    table = (torch.randperm(4095, device="cuda").int() + 1)[:4000].view(8, 500)
    slots = torch.arange(8, device="cuda")
    first = torch.zeros(8, dtype=torch.int32, device="cuda")
    out = torch.randn(4096, 16, VALUE, dtype=torch.bfloat16, device="cuda")
    lse = torch.randn(4096, 16, device="cuda")
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "merge_states 4k, h16": (lambda: merge_states(out, lse, out, lse), 3 * out.nbytes)
    }

    def gather(length: int) -> Callable[[], object]:
        starts = torch.arange(9, dtype=torch.int32, device="cuda") * length
        return lambda: kv_gather(cache, table, slots, first, starts, 8 * length)

    for length in (1024, 16384):
        ways[f"kv_gather 8 x {length}"] = gather(length), 2 * 8 * length * 576 * 2
    rows = []
    for name, (run, moved) in ways.items():
        us, floor = time_us(run), floor_us(moved_bytes=moved)
        print(f"{name:24} {us:9.1f} us {moved / us / 1e6:6.2f} TB/s {floor:8.1f} us floor")
        rows.append({"kernel": name, "us": round(us, 2), "floor_us": round(floor, 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sweep", action="store_true", help="other tilings of our kernel too")
    parser.add_argument("--out", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    rows = [row for case in CASES for row in measure(case, sweep=arguments.sweep)]
    rows += measure_movers()
    record("mla_prefill", {"results": rows}, arguments.out)


if __name__ == "__main__":
    main()
