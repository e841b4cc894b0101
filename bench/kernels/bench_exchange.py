"""Times the exchange of rows between DP ranks on several GPUs, there and back.

    python bench/kernels/bench_exchange.py --ranks 2

Rows and the rule that chooses experts are DeepSeek-V3's, its experts are divided among the ranks in order. Times are those of rank
0 in a CUDA graph, of a call behind others of its kind:

* `nccl`: quantized rows and logits of the gate are gathered, results are summed and scattered.
* `one-shot`: plain rows are gathered and results are scattered by our kernels, for few rows.
* `direct`: quantized rows go to the ranks of their experts alone, and results come back from there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.timing import time_graph_us
from record import record

from mla_router.worker.kernels.comm import one_shot, one_shot_all_to_all
from mla_router.worker.kernels.comm.all_to_all import Choice, ExpertTables
from mla_router.worker.kernels.comm.connect import Meeting
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.comm.mailboxes import join_one_shot
from mla_router.worker.kernels.moe.routing import RoutingRule, moe_routing
from mla_router.worker.kernels.quantize import quantize_rows
from mla_router.worker.model.parallel.placement import trivial

WIDTH, EXPERTS = 7168, 256
RULE = RoutingRule(top_k=8, scoring="sigmoid", num_groups=8, top_groups=4, normalize=True)
ROUNDS = 3

Ways = Mapping[str, Callable[[], object]]


class Rank:
    """One rank of `size`, with its GPU."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        # Binding memory to a multicast object waits for as many devices as there are ranks
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        store = FileStore(str(folder / "store"), -1)
        self.group = Group.join(rank, size, Meeting(store, self.device, shares_memory=False))
        joined = [
            join_one_shot(rank, size, store, self.device, name, all_to_all=all_to_all)
            for name, all_to_all in (("sums", False), ("rows", True))
        ]
        self.mailboxes, self.row_boxes = joined[0].boxes, joined[1].row_boxes
        if self.row_boxes is None:
            raise SystemExit(joined[1].choice)

    def ways(self, count: int) -> Ways:
        """Returns the ways to exchange `count` rows of each rank."""
        group, boxes, row_boxes = self.group, self.mailboxes, self.row_boxes
        assert boxes is not None and row_boxes is not None
        torch.manual_seed(group.rank)
        counts = (count,) * group.size
        rows = torch.randn(count, WIDTH, device=self.device).bfloat16()
        results = torch.randn(sum(counts), WIDTH, device=self.device).bfloat16()
        logits = torch.randn(count, EXPERTS, device=self.device)
        quantized = quantize_rows(rows, torch.float8_e4m3fn)
        parts = quantized.values.view(torch.uint8), quantized.scales.contiguous(), logits
        choice = Choice(*moe_routing(logits, RULE))
        placement = trivial(1, EXPERTS, group.size)
        tables = [placement.table(0, rank).to(self.device) for rank in range(group.size)]
        reaches = torch.stack([table >= 0 for table in tables], dim=-1)
        experts = ExpertTables(tables[group.rank], reaches)

        def nccl() -> object:
            return group.gather_together(parts, counts), group.scatter_rows(results, counts)

        def few() -> object:
            return one_shot.gather_rows(boxes, rows), one_shot.scatter_rows(boxes, results)

        def direct() -> object:
            sent = one_shot_all_to_all.dispatch(row_boxes, quantized, choice, experts)
            return one_shot_all_to_all.combine(row_boxes, results, sent)

        ways: dict[str, Callable[[], object]] = {"nccl": nccl, "direct": direct}
        return ways | ({"one-shot": few} if boxes.serve(rows, count) else {})

    def times(self, count: int) -> dict[str, float]:
        """Returns the median us of each way, in rounds of alternating order."""
        ways = self.ways(count)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(ROUNDS):
            for name in sorted(ways, reverse=turn % 2 > 0):
                times[name].append(time_graph_us(ways[name]))
        return {name: round(statistics.median(of_way), 2) for name, of_way in times.items()}


def run(rank: int, size: int, folder: Path, rows: list[int], out: Path | None) -> None:
    own = Rank(rank, size, folder)
    found = [{"rows": count, "us": own.times(count)} for count in rows]
    if rank == 0:
        for row in found:
            print(row)
        record("exchange", {"ranks": size, "width": WIDTH, "rows": found}, out)
    sys.stdout.flush()
    os._exit(0)  # without the teardown of NCCL, which would wait for ranks that have ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        shared = args.ranks, Path(name), args.rows, args.out
        ranks = [context.Process(target=run, args=(rank, *shared)) for rank in range(args.ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
