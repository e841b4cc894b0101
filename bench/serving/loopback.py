"""A group of ranks of which one exists, for simulations of one rank of several on one device.

Rank 0 is real. A gather returns its rows and random rows in place of the others': in a mixture their tokens spread over
the experts. A sum returns its own part. On a GPU each collective occupies the stream for the modelled time of NVLink, by a
kernel that looks at the device's clock, so that captured graphs and work beside them are as with real collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from mla_router.worker.kernels.comm.all_to_all import Choice, Dispatched, ExpertTables
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.comm.mailboxes import MAX_SENT_ROWS
from mla_router.worker.kernels.moe.routing import RoutingRule, moe_routing
from mla_router.worker.kernels.quantize import quantize_rows
from mla_router.worker.kernels.weight import Activations, Quantized


@dataclass(frozen=True)
class Link:
    """A rank sends and receives `bytes_per_s` at the same time. Each collective takes `latency_s` more."""

    bytes_per_s: float
    latency_s: float

    def gather_s(self, nbytes: int, ranks: int) -> float:
        """Returns the seconds of a gather with a result of `nbytes`, or of a reduce-scatter of as many: a rank receives, or
        sends, the parts of all others once."""
        return self.latency_s + nbytes * (ranks - 1) / ranks / self.bytes_per_s

    def all_reduce_s(self, nbytes: int, ranks: int) -> float:
        """Returns the seconds of an all-reduce: a reduce-scatter and a gather, with the latency of one."""
        return 2 * self.gather_s(nbytes, ranks) - self.latency_s


def random_rows(
    ranks: int, most: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns memory for `ranks` ranks with at most `most` rows each. It is filled here, because the first call may be in a
    capture, which would fill it only when the graph is replayed."""
    return torch.randn(ranks * most, width, dtype=dtype, device=device)


def quantized_rows(rows: Tensor, experts: int, rule: RoutingRule) -> tuple[Tensor, ...]:
    """Returns what other ranks send if they send `rows` quantized: values, scales, and logits of so many experts, or the
    weights and ids of chosen ones."""
    quantized = quantize_rows(rows, torch.float8_e4m3fn)
    logits = torch.randn(len(rows), experts, device=rows.device)
    values, scales = quantized.values.view(torch.uint8), quantized.scales.contiguous()
    return values, scales, logits, *moe_routing(logits, rule)


class LoopbackGroup(Group):
    """Rank 0 of `size` ranks without the others."""

    def __init__(self, size: int, link: Link, *rows: Tensor, all_to_all: bool = False) -> None:
        """`rows`: of all ranks, for gathers of rows of each dtype and width. `all_to_all`: see `Groups.join`, on a GPU."""
        super().__init__(0, size, object())
        self.link = link
        self.waited_s = 0.0  # modelled time of all calls so far; a replayed graph makes none
        self._all_to_all = all_to_all and rows[0].is_cuda
        self._most = len(rows[0]) // size
        self._rows = {(each.dtype, each.shape[1]): each for each in rows}

    @property
    def backend(self) -> str:
        return "loopback"

    def all_reduce(self, x: Tensor) -> Tensor:
        self._wait(x, self.link.all_reduce_s(x.nbytes, self.size))
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Returns `x` in place of each rank's."""
        self._wait(x, self.link.gather_s(self.size * x.nbytes, self.size))
        return torch.cat([x] * self.size, dim)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns own rows, then random ones. The next call overwrites own rows."""
        return self.gather_together([x], counts)[0]

    def gather_together(self, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Takes the time of one gather of the bytes of all parts."""
        gathered = self._of_all(parts, counts)
        nbytes = sum(rows.nbytes for rows in gathered)
        self._wait(parts[0], self.link.gather_s(nbytes, self.size))
        return gathered

    def dispatches(self, width: int, dtype: torch.dtype, top_k: int, counts: Sequence[int]) -> bool:
        del width, dtype, top_k
        return self._all_to_all and len(set(counts)) == 1 and 0 < counts[0] <= MAX_SENT_ROWS

    def dispatch(
        self, rows: Activations, choice: Choice, experts: ExpertTables, counts: Sequence[int]
    ) -> Dispatched:
        """Takes the time in which the rows leave for the ranks of their experts, or others come, if that is longer."""
        parts = [rows] if isinstance(rows, Tensor) else [rows.values.view(torch.uint8), rows.scales]
        *sent, weights, ids = self._of_all([*parts, *choice], counts)
        went = torch.empty(counts[0], self.size, dtype=torch.bool, device=ids.device)
        out = torch.empty_like(weights), torch.empty_like(ids), went, went.new_empty(len(ids))
        _dispatch_on_device[(1,)](
            weights,
            ids,
            experts.table,
            experts.reaches,
            *out,
            *self._times(parts),
            _bytes_a_row(choice),
            TOTAL=len(ids),
            OWN=counts[0],
            SIZE=self.size,
            TOP_K=ids.shape[1],
            COLUMNS=experts.table.shape[1],
            ROWS=128,
            num_warps=16,
        )
        if isinstance(rows, Quantized):
            values = sent[0].view(rows.values.dtype)
            return Dispatched(Quantized(values, sent[1], rows.group, rows.dtype), *out)
        return Dispatched(sent[0], *out)

    def combine(self, results: Tensor, sent: Dispatched, counts: Sequence[int]) -> Tensor:
        """Returns own parts. Takes the time of the others'."""
        _combine_on_device[(1,)](
            sent.went,
            sent.came,
            *self._times([results]),
            OWN=counts[0],
            TOTAL=len(results),
            SIZE=self.size,
            BLOCK=1024,
            num_warps=4,
        )
        return results[: counts[0]]

    def _of_all(self, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        own, total = len(parts[0]), sum(counts)
        assert own == counts[0] <= self._most, f"{own} rows, {counts=}, {self._most=}"
        start = self._most - own
        gathered = [self._rows[x.dtype, x.shape[1]][start : start + total] for x in parts]
        for x, rows in zip(parts, gathered, strict=True):
            rows[:own] = x
        return gathered

    def _times(self, parts: Sequence[Tensor]) -> tuple[float, float, int]:
        """Returns the nanoseconds of a collective and of a byte, and the bytes of a row of all `parts`."""
        return 1e9 * self.link.latency_s, 1e9 / self.link.bytes_per_s, _bytes_a_row(parts)

    def scatter_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        self._wait(x, self.link.gather_s(x.nbytes, self.size))
        return x[: counts[0]]

    def _wait(self, x: Tensor, seconds: float) -> None:
        if not x.numel():
            return
        self.waited_s += seconds
        if x.is_cuda:
            _wait_on_device[(1,)](round(1e9 * seconds), num_warps=1)


@triton.jit(do_not_specialize=["nanoseconds"])
def _wait_on_device(nanoseconds):
    now = globaltimer()
    end = now + nanoseconds
    while now < end:
        now = globaltimer()


def _bytes_a_row(parts: Sequence[Tensor]) -> int:
    return sum(part.shape[1] * part.itemsize for part in parts)


@triton.jit
def _dispatch_on_device(
    weights,
    ids,
    table,
    reaches,
    local_weights,
    local_ids,
    went,
    came,
    latency,
    of_a_byte,
    row_bytes,
    choice_bytes,
    TOTAL: tl.constexpr,
    OWN: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Writes the fields of `Dispatched` on rank 0. The choices of all rows travel, and the rows of some."""
    begin = globaltimer()
    k = tl.arange(0, TOP_K)[None, :]
    left, arrived = 0, 0
    for start in range(0, TOTAL, ROWS):
        row = start + tl.arange(0, ROWS)
        exists = row < TOTAL
        pair = row[:, None] * TOP_K + k
        chosen = tl.load(ids + pair, exists[:, None], other=-1)
        routed = chosen >= 0
        place = chosen * COLUMNS + row[:, None] % COLUMNS
        local = tl.load(table + place, routed, other=-1)
        weight = tl.load(weights + pair, exists[:, None], other=0.0)
        tl.store(local_ids + pair, local, exists[:, None])
        tl.store(local_weights + pair, tl.where(local < 0, 0.0, weight), exists[:, None])
        is_here = tl.max((local >= 0).to(tl.int32), 1)
        tl.store(came + row, is_here > 0, exists)
        arrived += tl.sum(tl.where(row < OWN, 0, is_here), 0)
        if start < OWN:
            own = row < OWN
            for rank in tl.static_range(SIZE):
                reached = tl.load(reaches + place * SIZE + rank, routed, other=0)
                goes = tl.where(own, tl.max(reached.to(tl.int32), 1), 0)
                tl.store(went + row * SIZE + rank, goes > 0, own)
                if rank > 0:
                    left += tl.sum(goes, 0)
    nbytes = tl.maximum(left, arrived) * row_bytes + OWN * (SIZE - 1) * choice_bytes
    _wait_until(begin, latency + of_a_byte * nbytes.to(tl.float32))


@triton.jit
def _combine_on_device(
    went,
    came,
    latency,
    of_a_byte,
    row_bytes,
    OWN: tl.constexpr,
    TOTAL: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin = globaltimer()
    left, arrived = 0, 0
    for start in range(0, TOTAL, BLOCK):
        at = start + tl.arange(0, BLOCK)
        goes_back = tl.load(came + at, (at >= OWN) & (at < TOTAL), other=0)
        left += tl.sum(goes_back.to(tl.int32), 0)
        # OWN * SIZE = TOTAL
        comes_back = tl.load(went + at, (at % SIZE > 0) & (at < TOTAL), other=0)
        arrived += tl.sum(comes_back.to(tl.int32), 0)
    nbytes = tl.maximum(left, arrived) * row_bytes
    _wait_until(begin, latency + of_a_byte * nbytes.to(tl.float32))


@triton.jit
def _wait_until(begin, nanoseconds):
    end = begin + nanoseconds.to(tl.int64)
    now = globaltimer()
    while now < end:
        now = globaltimer()
