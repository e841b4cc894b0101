"""Calls of collectives over mailboxes, for the processes of `support.ranks`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mla_router.worker.kernels.comm import one_shot
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.comm.one_shot import EMPTY, GENERATIONS, Mailboxes, clear
from mla_router.worker.kernels.rms_norm import add_rms_norm_torch
from support.shared_files import map_files

EPS = 1e-6
OPS = "sum", "sum_add_norm", "gather", "scatter"


class Call(NamedTuple):
    op: str
    rows: int
    width: int
    seed: int = 0


def inputs(call: Call, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Returns the argument of `rank`, [T, N], or [size T, N] of a scatter: with zeros of both signs, and other numbers on
    each rank."""
    draw = torch.Generator().manual_seed(1000 * call.seed + rank)
    rows = call.rows * (size if call.op == "scatter" else 1)
    x = torch.randn(rows, call.width, generator=draw)
    x[torch.rand(x.shape, generator=draw) < 0.1] = -0.0
    return x.to(dtype)


def norm_inputs(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns residual [T, N] and weight [N]."""
    draw = torch.Generator().manual_seed(call.seed)
    residual = torch.randn(call.rows, call.width, generator=draw)
    return residual.to(dtype), torch.randn(call.width, generator=draw).to(dtype)


def expected(call: Call, rank: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns the results on `rank`. Ranks are added in their order, in float32."""
    parts = [inputs(call, other, size, dtype) for other in range(size)]
    if call.op == "gather":
        return (torch.cat(parts),)
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total = total + part.float()
    summed = total.to(dtype)
    if call.op == "scatter":
        return (summed.chunk(size)[rank],)
    if call.op == "sum":
        return (summed,)
    residual, weight = norm_inputs(call, dtype)
    return add_rms_norm_torch(summed, residual, weight, EPS)


def run(boxes: Mailboxes, call: Call) -> tuple[Tensor, ...]:
    """Launches the call on the device of `boxes`, with rows among NaN."""
    dtype, device = boxes.slots.dtype, boxes.slots.device
    own = inputs(call, boxes.rank, boxes.size, dtype)
    wide = torch.full((len(own) + 2, call.width), float("nan"), dtype=dtype, device=device)
    x = wide[1:-1]
    x.copy_(own)
    if call.op == "sum":
        results: tuple[Tensor, ...] = (one_shot.sum_rows(boxes, x),)
    elif call.op == "gather":
        results = (one_shot.gather_rows(boxes, x),)
    elif call.op == "scatter":
        results = (one_shot.scatter_rows(boxes, x),)
    else:
        residual, weight = (tensor.to(device) for tensor in norm_inputs(call, dtype))
        results = one_shot.sum_add_norm(boxes, x, residual, weight, EPS)
    assert wide[0].isnan().all() and wide[-1].isnan().all(), f"{call} wrote beyond its rows"
    return tuple(result.cpu() for result in results)


def run_all(boxes: Mailboxes, calls: Sequence[Call], delays_s: float) -> list[tuple[Tensor, ...]]:
    """Returns the results, and checks that afterwards only slots of each row's last call hold anything. Each rank waits at
    random before a call."""
    draw = random.Random(boxes.rank)
    results = []
    for call in calls:
        time.sleep(draw.random() * delays_s)
        results.append(run(boxes, call))
    coming = (boxes.turns % 4).long().cpu()
    bits = boxes.slots.view(torch.int16).cpu()
    for row, generation in enumerate(coming.tolist()):
        for ahead in range(GENERATIONS - 1):
            slots = bits[(generation + ahead) % GENERATIONS, row]
            assert (slots == EMPTY.value).all(), f"row {row}: {generation=}, {ahead=}"
    return results


def in_files(
    group: Group, folder: Path, calls: Sequence[Call], delays_s: float
) -> list[tuple[Tensor, ...]]:
    """`run_all` of float16 in memory that processes on a CPU share."""
    return run_all(_map_files(group, folder), calls, delays_s)


@cache
def _map_files(group: Group, folder: Path) -> Mailboxes:
    shape = torch.Size((GENERATIONS, 4, group.size, 64))
    turns = torch.empty(shape[1], dtype=torch.int32)
    own, addresses = map_files(
        group, folder, "mailboxes", shape.numel(), torch.float16, partial(clear, turns=turns)
    )
    return Mailboxes(group.rank, own.view(shape), addresses, turns)


def on_a_gpu(boxes: Mailboxes, calls: Sequence[Call], delays_s: float) -> list[tuple[Tensor, ...]]:
    return run_all(boxes, calls, delays_s)


def in_graphs(boxes: Mailboxes, replays: int) -> tuple[int, int]:
    """Replays two graphs with calls of different sizes in random order, the same on all ranks. Returns the numbers of
    replays and of wrong results."""
    device, size = boxes.slots.device, boxes.size
    sizes = (2, 2048), (5, 512)
    rows = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in sizes]
    ones = torch.ones(2048, dtype=torch.bfloat16, device=device)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        total = one_shot.sum_rows(boxes, x.clone())
        gathered = one_shot.gather_rows(boxes, total)
        scattered = one_shot.scatter_rows(boxes, gathered)
        return one_shot.sum_add_norm(boxes, scattered, x, ones[: x.shape[1]], EPS)

    for x in rows:
        step(x)
    torch.cuda.synchronize(device)
    graphs, outputs = [], []
    for x in rows:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outputs.append(step(x))
    draw, wrong = random.Random(1), torch.zeros((), dtype=torch.int64, device=device)
    for replay in range(replays):
        which = draw.randrange(len(graphs))
        shape = sizes[which]
        # Small integers: sums are exact. `base` differs between replays, so an old row is a wrong one
        base = torch.arange(shape[1], device=device) % 8 + replay % 5
        rows[which].copy_(base + boxes.rank)
        graphs[which].replay()
        first = size * base + size * (size - 1) // 2
        expected_total = size * size * first + base + boxes.rank
        wrong += (outputs[which][1] != expected_total.to(torch.bfloat16)).any()
    return replays, int(wrong)
