"""Rows that are sent to the ranks of their experts, for the processes of `support.ranks`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mla_router.worker.kernels.comm import one_shot_all_to_all
from mla_router.worker.kernels.comm.all_to_all import (
    Choice,
    Dispatched,
    ExpertTables,
    combine_torch,
    dispatch_torch,
)
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.comm.one_shot_all_to_all import EMPTY_WORD, RowBoxes, clear, words
from mla_router.worker.kernels.quantize import quantize_rows_torch
from mla_router.worker.kernels.weight import Activations, Quantized
from mla_router.worker.model.parallel.placement import trivial
from support.shared_files import map_files

TOP_K, EXPERTS = 4, 16


class Rows(NamedTuple):
    """One exchange of `counts` rows of the ranks. `quantized`: the dtype of the values, or None."""

    counts: tuple[int, ...]
    width: int
    quantized: torch.dtype | None = None
    seed: int = 0


class Outcome(NamedTuple):
    """The results of a rank. `rows`: those that came."""

    rows: Tensor
    weights: Tensor
    ids: Tensor
    went: Tensor
    came: Tensor
    counted: Tensor
    own: Tensor


def tables(rank: int, size: int, device: torch.device) -> ExpertTables:
    """Returns the places of 16 experts and as many replicas as there are ranks."""
    placement = trivial(1, EXPERTS, size, redundant=size)
    of_ranks = [placement.table(0, other) for other in range(size)]
    reaches = torch.stack([table >= 0 for table in of_ranks], dim=-1)
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    return ExpertTables(*(x.to(device) for x in (of_ranks[rank], reaches, counts)))


def inputs(rows: Rows, rank: int, dtype: torch.dtype) -> tuple[Activations, Choice]:
    """Returns rows with zeros of both signs, and their experts. Some rows are idle."""
    draw = torch.Generator().manual_seed(1000 * rows.seed + rank)
    count = rows.counts[rank]
    x = torch.randn(count + 1, rows.width, generator=draw)
    x[torch.rand(x.shape, generator=draw) < 0.3] = -0.0
    ids = torch.rand(count, EXPERTS, generator=draw).topk(TOP_K).indices.int()
    weights = torch.rand(count, TOP_K, generator=draw)
    idle = torch.rand(count, generator=draw) < 0.2
    ids[idle], weights[idle] = -1, 0.0
    if rows.quantized is None:
        return x[:count].to(dtype), Choice(weights, ids)
    quantized = quantize_rows_torch(x.to(dtype), rows.quantized)  # at least one row
    values, scales = quantized.values[:count], quantized.scales[:count]
    return quantized._replace(values=values, scales=scales), Choice(weights, ids)


def results_of(rows: Rows, rank: int, came: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns results [S, N] of a rank. Those of rows that are not on their way back are NaN."""
    draw = torch.Generator().manual_seed(7000 * rows.seed + rank)
    results = torch.randn(sum(rows.counts), rows.width, generator=draw).to(dtype)
    first = sum(rows.counts[:rank])
    kept = came.cpu().clone()
    kept[first : first + rows.counts[rank]] = True
    return results.masked_fill(~kept[:, None], float("nan"))


def bits(x: Activations) -> Tensor:
    """Returns the rows, dequantized, without the sign of zeros."""
    return (x.dense() if isinstance(x, Quantized) else x).float().cpu() + 0.0


def expected(rows: Rows, rank: int, dtype: torch.dtype) -> Outcome:
    """Returns the results of `rank` by loops over rows and experts."""
    size = len(rows.counts)
    placement = trivial(1, EXPERTS, size, redundant=size)
    of_ranks = [placement.table(0, other).tolist() for other in range(size)]
    of_all = [inputs(rows, other, dtype) for other in range(size)]
    chosen = torch.cat([choice.ids for _, choice in of_all]).tolist()
    reached = torch.zeros(len(chosen), size, dtype=torch.bool)
    ids = torch.full((len(chosen), TOP_K), -1, dtype=torch.int32)
    counted = torch.zeros(EXPERTS, dtype=torch.int64)
    for row, of_row in enumerate(chosen):
        for k, expert in enumerate(of_row):
            if expert < 0:
                continue
            counted[expert] += 1
            for other, table in enumerate(of_ranks):
                place = table[expert][row % len(table[expert])]
                reached[row, other] |= place >= 0
                if other == rank:
                    ids[row, k] = place
    weights = torch.cat([choice.weights for _, choice in of_all]).masked_fill(ids < 0, 0.0)
    values = torch.cat([bits(x) for x, _ in of_all])
    first = sum(rows.counts[:rank])
    own = range(first, first + rows.counts[rank])
    total = torch.zeros(len(own), rows.width)
    for other in range(size):
        part = results_of(rows, other, reached[:, other], dtype)[own.start : own.stop].float()
        adds = reached[own.start : own.stop, other] | (other == rank)
        total += torch.where(adds[:, None], part, 0.0)
    came = reached[:, rank]
    went = reached[own.start : own.stop]
    return Outcome(values[came], weights, ids, went, came, counted, total.to(dtype).float() + 0.0)


def run(rank: RowBoxes | Group, rows: Rows, dtype: torch.dtype, device: torch.device) -> Outcome:
    own, choice = inputs(rows, rank.rank, dtype)
    if isinstance(own, Quantized):
        own = own._replace(values=own.values.to(device), scales=own.scales.to(device))
    else:
        own = own.to(device)
    choice = Choice(choice.weights.to(device), choice.ids.to(device))
    experts = tables(rank.rank, rank.size, device)
    if isinstance(rank, Group):
        sent = dispatch_torch(rank, own, choice, experts, rows.counts)
        raw = sent.rows.values if isinstance(sent.rows, Quantized) else sent.rows
        assert (raw.view(torch.uint8)[~sent.came] == 0xFF).all(), "a row came that no expert needs"
    else:
        sent = one_shot_all_to_all.dispatch(rank, own, choice, experts)
    results = results_of(rows, rank.rank, sent.came, dtype).to(device)
    if isinstance(rank, Group):
        back = combine_torch(rank, results, sent, rows.counts)
    else:
        back = one_shot_all_to_all.combine(rank, results, sent)
    return _outcome(sent, experts, back)


def _outcome(sent: Dispatched, experts: ExpertTables, back: Tensor) -> Outcome:
    assert experts.counts is not None
    came = sent.came.cpu()
    others = (sent.weights, sent.ids, sent.went, came, experts.counts)
    return Outcome(bits(sent.rows)[came], *(x.cpu() for x in others), bits(back))


def run_all(boxes: RowBoxes, cases: Sequence[Rows], delays_s: float) -> list[Outcome]:
    """Returns the results, and checks that nothing is left in memory: what was sent was read. Each rank waits at random
    before a call."""
    draw, device = random.Random(boxes.rank), boxes.memory.device
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    outcomes = []
    for rows in cases:
        time.sleep(draw.random() * delays_s)
        outcomes.append(run(boxes, rows, dtype, device))
    return outcomes


def is_empty(boxes: RowBoxes) -> bool:
    """Whether all that was sent to this rank was read, after the last call of all ranks."""
    return bool((boxes.memory == EMPTY_WORD.value).all())


def in_files(
    group: Group, folder: Path, cases: Sequence[Rows], delays_s: float
) -> tuple[list[Outcome], bool]:
    """`run_all` and `is_empty` in memory that processes on a CPU share."""
    boxes = _map_files(group, folder)
    outcomes = run_all(boxes, cases, delays_s)
    group.all_reduce(torch.zeros(1))
    return outcomes, is_empty(boxes)


def in_graphs(boxes: RowBoxes, replays: int) -> tuple[int, int]:
    """Replays two graphs with exchanges of different sizes in random order, the same on all ranks. Returns the numbers of
    replays and of wrong results."""
    device, size, rank = boxes.memory.device, boxes.size, boxes.rank
    shapes = (3, 2048), (5, 512)
    experts = tables(rank, size, device)
    rows = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    choices = [
        Choice(torch.ones(count, TOP_K, device=device), torch.zeros_like(ids))
        for count, _ in shapes
        for ids in [torch.zeros(count, TOP_K, dtype=torch.int32, device=device)]
    ]

    def step(x: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """Returns the sums of rows, and the number of ranks that have added each."""
        ranks = x.new_ones(len(x))
        for _ in range(3):
            sent = one_shot_all_to_all.dispatch(boxes, x, choice, experts)
            assert isinstance(sent.rows, Tensor)
            results = sent.rows.masked_fill(~sent.came[:, None], float("nan"))
            results[rank * len(x) : (rank + 1) * len(x)] = x
            x = one_shot_all_to_all.combine(boxes, results, sent)
            sent.went[:, rank] = True
            ranks = ranks * sent.went.sum(1)
        return x, ranks

    for x, choice in zip(rows, choices, strict=True):
        step(x, choice)
    torch.cuda.synchronize(device)
    graphs, outputs = [], []
    for x, choice in zip(rows, choices, strict=True):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outputs.append(step(x, choice))
    order, wrong = random.Random(1), torch.zeros((), dtype=torch.int64, device=device)
    draw = torch.Generator(device).manual_seed(rank)
    for replay in range(replays):
        which = order.randrange(len(graphs))
        x, ids = rows[which], choices[which].ids
        # Small integers: sums are exact. They differ between replays, so an old row is a wrong one
        x.copy_(torch.arange(x.shape[1], device=device) % 2 + replay % 2 + rank % 2)
        drawn = torch.rand(len(ids), EXPERTS, device=device, generator=draw).topk(TOP_K).indices
        ids.copy_(drawn.masked_fill(torch.rand(len(ids), 1, device=device) < 0.2, -1))
        graphs[which].replay()
        total, ranks = outputs[which]
        wrong += (total != x * ranks[:, None]).any()
    return replays, int(wrong)


def over_gloo(group: Group, cases: Sequence[Rows]) -> list[Outcome]:
    return [run(group, rows, torch.float32, torch.device("cpu")) for rows in cases]


@cache
def _map_files(group: Group, folder: Path) -> RowBoxes:
    rows, width = 4, 256
    turns = torch.empty(rows, dtype=torch.int32)
    own, addresses = map_files(
        group,
        folder,
        "row-boxes",
        words(rows, group.size, width),
        torch.int32,
        partial(clear, turns=turns),
    )
    return RowBoxes(group.rank, group.size, width, own, addresses, turns)
