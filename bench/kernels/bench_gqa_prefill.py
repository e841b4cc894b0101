"""Grouped-query prefill in bf16 at the shapes of Llama 3 8B and Gemma 2, beside FlashInfer's fa3 if installed.

    python bench/kernels/bench_gqa_prefill.py --out bench/results/gqa_prefill.jsonl

Gemma 2's with and without window and soft cap. The floor counts the products of visible keys. The time is with a cold L2,
without the table of work, which is made once a step for all layers.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.error import relative_error
from kernels.timing import floor_us, time_us
from record import record

from kernels import flashinfer_gqa
from mla_router.worker.kernels.attention.prefill_work import PrefillWork
from mla_router.worker.kernels.attention.ragged_attention import ragged_attention
from mla_router.worker.kernels.attention.ragged_attention.tiling import block_queries
from mla_router.worker.kernels.device import limits


@dataclass(frozen=True)
class Case:
    model: str
    heads: int
    num_kv_heads: int
    width: int
    extents: tuple[tuple[int, int], ...]  # query rows and key rows of each chunk
    window: int | None = None
    softcap: float | None = None

    @property
    def flops(self) -> float:
        pairs = 0
        for queries, keys in self.extents:
            seen = range(keys - queries + 1, keys + 1)
            pairs += sum(min(n, self.window or n) for n in seen)
        return 4.0 * pairs * self.heads * self.width


EXTENTS = (((1024, 1024),) * 8, ((8192, 8192),), ((4096, 8192),), ((64, 8192),) * 4)
KINDS = (("Llama 3 8B", 32, 8, 128), ("Gemma 2 9B", 16, 8, 256), ("Gemma 2 27B", 32, 16, 128))
CASES = [
    Case(*kind, extents, window, softcap)
    for kind in KINDS
    for extents in EXTENTS
    for window, softcap in ((None, None), (None, 50.0), (4096, 50.0))
    if kind[0].startswith("Gemma") or softcap is None
]


def measure(case: Case) -> dict[str, Any]:
    queries, keys = (sum(column) for column in zip(*case.extents, strict=True))
    k, v = torch.randn(2, keys, case.num_kv_heads, case.width, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(queries, case.heads, case.width, device="cuda", dtype=torch.bfloat16)
    rows = block_queries(case.width, case.width, limits(q.device))
    work = PrefillWork.on(
        "cuda", case.extents, heads=case.heads, block_queries=rows, window=case.window
    )
    scale = case.width**-0.5

    def ours() -> torch.Tensor:
        return ragged_attention(q, k, v, None, work, scale=scale, softcap=case.softcap)[0]

    row: dict[str, Any] = {
        "us": round(time_us(ours), 1),
        "floor_us": round(floor_us(flops=case.flops), 1),
        "flashinfer_us": None,
    }
    if flashinfer_gqa.installed():
        theirs = flashinfer_gqa.prefill(
            q, k, v, case.extents, scale=scale, window=case.window, softcap=case.softcap
        )
        row["flashinfer_us"] = round(time_us(theirs), 1)
        row["flashinfer_difference"] = relative_error(theirs(), ours())
    return asdict(case) | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    print(
        f"{'model':12} {'queries x keys':>18} window softcap       us    floor  of floor  FlashInfer"
    )
    for case in CASES:
        row = measure(case)
        rows.append(row)
        (queries, keys), chunks = case.extents[0], len(case.extents)
        print(
            f"{case.model:12} {f'{chunks} x {queries} x {keys}':>18} {case.window or '-':>6} "
            f"{case.softcap or '-':>7} {row['us']:8.1f} {row['floor_us']:8.1f} "
            f"{row['floor_us'] / row['us']:8.0%}  {row['flashinfer_us'] or '-':>10} "
            f"{row.get('flashinfer_difference', '')}",
            flush=True,
        )
    record("gqa_prefill", {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
