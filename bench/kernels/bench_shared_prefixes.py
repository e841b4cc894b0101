"""MLA decode in bf16 with V2-Lite's 16 heads, for adjacent requests with a common prefix: without and with
shared-prefix batching.

    python bench/kernels/bench_shared_prefixes.py --out bench/results/shared_prefixes.jsonl

`us` is the time of one layer in a CUDA graph of consecutive calls over different caches, as the layers of a step. The
floor counts every cached row once, even if several requests share it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.kernels.attention.decode_schedule import decode_schedule
from mla_router.worker.kernels.attention.decode_tiling import num_parts, tiling
from mla_router.worker.kernels.attention.mla_decode import mla_decode
from mla_router.worker.kernels.attention.shared_prefixes import GROUP, shared_prefixes
from mla_router.worker.kernels.device import limits

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record
from timing import floor_us, time_graph_us

HEADS, LATENT, ROPE, PAGE_SIZE, SCALE = 16, 512, 64, 16, 0.1147
CACHES_BYTES = 6 << 30


@dataclass(frozen=True)
class Case:
    runs: int  # of requests that begin alike
    requests: int  # of a run
    common: int  # rows that those of a run have in common
    own: int  # rows of each beside them

    @property
    def floor_us(self) -> float:
        rows = self.runs * (self.common + self.requests * self.own)
        return floor_us(moved_bytes=rows * (LATENT + ROPE) * 2)


CASES = [
    Case(64, 16, 2048, 256),  # generated-shared-prefix, in its midst
    Case(1, 1024, 1024, 512),
    Case(16, 16, 2048, 256),
    Case(1, 256, 2048, 512),
    Case(16, 16, 512, 512),
    Case(1, 128, 4096, 512),
    Case(128, 1, 0, 1024),
    Case(256, 1, 0, 1024),
    Case(1024, 1, 0, 1024),
]


class Inputs:
    """Pages in random order."""

    def __init__(self, case: Case) -> None:
        total = case.runs * case.requests
        shared, own = case.common // PAGE_SIZE, -(-case.own // PAGE_SIZE)
        count = case.runs * shared + total * own
        pages = torch.randperm(count, device="cuda").int() + 1
        first = pages[: case.runs * shared].view(case.runs, 1, shared)
        first = first.expand(-1, case.requests, -1).reshape(total, shared)
        self.page_table = torch.cat((first, pages[case.runs * shared :].view(total, own)), dim=1)
        width = LATENT + ROPE
        copies = min(max(CACHES_BYTES // (count * PAGE_SIZE * width * 2), 1), 8)
        self.caches = torch.randn(
            copies, count + 1, PAGE_SIZE, width, dtype=torch.bfloat16, device="cuda"
        )
        self.q = torch.randn(total, HEADS, width, dtype=torch.bfloat16, device="cuda")
        self.slots = torch.arange(total, device="cuda")
        self.longest = case.common + case.own
        self.lengths = torch.full((total,), self.longest, dtype=torch.int32, device="cuda")

    def us(self, *, shared: bool) -> tuple[float, Tensor]:
        """Returns the time of a call, and its result with the first cache."""
        device, total = self.lengths.device, len(self.lengths)
        prefixes = None
        if shared:
            chosen = tiling(HEADS, total // GROUP, GROUP, on=limits(torch.device("cuda")))
            prefixes = shared_prefixes(
                self.page_table,
                self.slots,
                self.lengths,
                page_size=PAGE_SIZE,
                max_length=self.longest,
                tiling=chosen,
                num_parts=num_parts(chosen, HEADS, GROUP, device),
            )
        chosen = tiling(HEADS, total, on=limits(torch.device("cuda")))
        schedule = decode_schedule(
            prefixes.own_lengths if prefixes else self.lengths,
            max_length=self.longest,
            tiling=chosen,
            num_parts=num_parts(chosen, HEADS, 1, device),
        )
        torch.cuda.synchronize()  # schedules are settled

        def attend(cache: Tensor) -> Tensor:
            return mla_decode(
                *self.q.split([LATENT, ROPE], dim=-1),
                cache,
                self.page_table,
                self.slots,
                self.lengths,
                schedule,
                scale=SCALE,
                settled=True,
                prefixes=prefixes,
            )

        turn = cycle(self.caches)
        launches = max(16 // len(self.caches), 1) * len(self.caches)
        times = [time_graph_us(lambda: attend(next(turn)), launches=launches) for _ in range(3)]
        return statistics.median(times), attend(self.caches[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        inputs = Inputs(case)
        (alone, expected), (shared, got) = (inputs.us(shared=on) for on in (False, True))
        assert (got - expected).abs().max() < 0.05 * expected.abs().max(), case
        rows.append(asdict(case) | {"us": alone, "shared_us": shared, "floor_us": case.floor_us})
        print(
            f"{case.runs:5} x {case.requests:4} requests, {case.common:5} + {case.own:4} rows: "
            f"{alone:7.1f} us alone, {shared:7.1f} shared, floor {case.floor_us:6.1f}",
            flush=True,
        )
    record("shared_prefixes", {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
