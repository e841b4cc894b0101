"""The ranks that share one model, and the collectives between them.

Gloo serves tensors on a CPU and defines each collective. NCCL serves tensors on a GPU: a call does not wait for the
device, and a CUDA graph can capture it. So do our own kernels for few rows (`one_shot.py`, `one_shot_all_to_all.py`),
where GPUs share memory; shape and dtype alone decide between both. All ranks must call the same collectives in the same
order, with tensors of one shape and dtype. Only those with `counts` take a different number of rows from each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from mla_router.worker.kernels.comm import one_shot, one_shot_all_to_all
from mla_router.worker.kernels.comm.all_to_all import (
    Choice,
    Dispatched,
    ExpertTables,
    combine_torch,
    dispatch_torch,
)
from mla_router.worker.kernels.comm.connect import Meeting, connect
from mla_router.worker.kernels.comm.mailboxes import NCCL_CHOSEN, join_one_shot
from mla_router.worker.kernels.rms_norm import add_rms_norm
from mla_router.worker.kernels.weight import Activations

# NCCL sets up the connections of an algorithm at its first use, which a CUDA graph cannot capture. Its algorithms for
# messages of this many numbers differ.
FIRST_CALLS = 1 << 8, 1 << 17, 1 << 24


class Group:
    """Rank `rank` of `size` ranks. The collectives of a group of one rank return their argument and launch nothing."""

    def __init__(self, rank: int, size: int, processes: Any) -> None:
        """`processes`: torch's process group, whose stubs lack the collectives; None for one rank."""
        assert (processes is None) == (size == 1), f"{size} ranks, {processes}"
        self.rank = rank
        self.size = size
        self.few_rows = NCCL_CHOSEN
        self._processes = processes
        # On the current stream, between the kernels before and after
        self._reduce, self._gather = AllreduceOptions(), AllgatherOptions()
        self._scatter = ReduceScatterOptions()
        self._reduce.asyncOp = self._gather.asyncOp = self._scatter.asyncOp = False

    @staticmethod
    @cache
    def alone() -> Group:
        """Returns the group of one rank."""
        return Group(0, 1, None)

    @staticmethod
    def join(
        rank: int,
        size: int,
        meeting: Meeting,
        *,
        name: str = "group",
        all_to_all: bool = False,
    ) -> Group:
        """Waits for the other ranks and returns the group: over gloo if the device is a CPU, else over NCCL and shared
        memory.

        `all_to_all`: whether the group's rows are for layers of experts, by `dispatch`; then the shared memory is for it.

        Groups in the same store have different names. The environment variable NCCL_SOCKET_IFNAME names the interface of
        NCCL.

        Raises RuntimeError if a rank is missing after `meeting.timeout_s`. So does a collective of gloo, and at once if
        a rank has ended. The process must then end, for others may wait for it. A collective of NCCL waits forever.
        """
        if size == 1:
            return Group.alone()
        group = Group(rank, size, connect(rank, size, meeting, name))
        device = meeting.device
        if device.type == "cuda":
            for numbers in FIRST_CALLS:
                x = torch.zeros(numbers, device=device)
                group.scatter_rows(group.all_gather(group.all_reduce(x), 0), (numbers,) * size)
            torch.cuda.synchronize(device)
            if meeting.shares_memory:
                group.few_rows = join_one_shot(
                    rank, size, meeting.store, device, name, all_to_all=all_to_all
                )
        return group

    @property
    def backend(self) -> str:
        """The library: "gloo" or "nccl"; empty for one rank."""
        return "" if self._processes is None else str(self._processes.name())

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replaces `x`, which is contiguous, by its sum over the ranks, and returns it. The sum is the same on all
        ranks, bit by bit."""
        boxes = self._boxes(x, len(x) if x.dim() else 0)
        if boxes is not None:
            return one_shot.sum_rows(boxes, x)
        if self._processes is not None and x.numel():
            _finish(self._processes.allreduce([x], self._reduce))
        return x

    def joins_norm(self, x: Tensor) -> bool:
        """Whether `sum_add_norm` of x [T, N] is one kernel."""
        return self._boxes(x, len(x)) is not None

    def sum_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns `add_rms_norm` of the sum of x [T, N] over the ranks. Overwrites `x`, which is contiguous."""
        boxes = self._boxes(x, len(x))
        if boxes is not None:
            return one_shot.sum_add_norm(boxes, x, residual, weight, eps)
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Returns the `x` of all ranks, in the order of the ranks, joined along the axis `dim`, which is not negative."""
        if self._processes is None:
            return x
        gathered = x.new_empty(self.size * x.numel())
        if x.numel():
            own = x.contiguous().view(-1)
            _finish(self._processes._allgather_base(gathered, own, self._gather))
        return gathered.view(self.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns the rows [S, ...] of all ranks, in the order of the ranks. `counts`: the number of rows of each rank,
        the same on all. `x` [counts[rank], ...]."""
        if self._processes is None:
            return x
        assert len(x) == counts[self.rank], f"{len(x)} rows, {counts=}, {self.rank=}"
        if len(set(counts)) == 1:
            boxes = self._boxes(x, len(x))
            return self.all_gather(x, 0) if boxes is None else one_shot.gather_rows(boxes, x)
        if self.backend == "nccl":
            gathered = x.new_empty(sum(counts), *x.shape[1:])
            parts = list(torch.split(gathered, list(counts)))
            _finish(self._processes.allgather([parts], [x.contiguous()], self._gather))
            return gathered
        # Gloo gathers only tensors of one shape
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: len(x)] = x
        equal = self.all_gather(padded, 0).chunk(self.size)
        return torch.cat([part[:count] for part, count in zip(equal, counts, strict=True)])

    def gather_together(self, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Returns `gather_rows` of each of `parts`, which may differ in width and dtype. NCCL has one launch for all of
        them if all ranks have equally many rows."""
        if self.backend != "nccl" or len(set(counts)) > 1 or not sum(counts):
            return [self.gather_rows(part, counts) for part in parts]
        gathered = [part.new_empty(sum(counts), *part.shape[1:]) for part in parts]
        self._processes._start_coalescing()
        for part, result in zip(parts, gathered, strict=True):
            self._processes._allgather_base(result, part.contiguous(), self._gather)
        _finish(self._processes._end_coalescing())
        return gathered

    def gathers_few(self, x: Tensor, counts: Sequence[int]) -> bool:
        """Whether `gather_rows` of x [T, N] is one of our own kernels. The same on all ranks."""
        return len(set(counts)) == 1 and self._boxes(x, counts[0]) is not None

    def scatter_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns this rank's rows [counts[rank], ...] of the sum of `x` [S, ...] over the ranks. `counts`: as of
        `gather_rows`. Overwrites `x`, which is contiguous."""
        if self._processes is None:
            return x
        assert len(x) == sum(counts), f"{len(x)} rows, {counts=}"
        if self.backend != "nccl":
            return torch.split(self.all_reduce(x), list(counts))[self.rank]
        own = x.new_empty(counts[self.rank], *x.shape[1:])
        if len(set(counts)) == 1:
            boxes = self._boxes(x, len(own))
            if boxes is not None:
                return one_shot.scatter_rows(boxes, x)
            _finish(self._processes._reduce_scatter_base(own, x, self._scatter))
        else:
            parts = list(torch.split(x, list(counts)))
            _finish(self._processes.reduce_scatter([own], [parts], self._scatter))
        return own

    def dispatches(self, width: int, dtype: torch.dtype, top_k: int, counts: Sequence[int]) -> bool:
        """Whether `dispatch` serves rows of `width` numbers of `dtype` with `top_k` experts each. The same on all ranks."""
        if self.backend == "gloo":
            return True
        boxes = self.few_rows.row_boxes
        is_equal = len(set(counts)) == 1
        return boxes is not None and is_equal and boxes.serve(width, dtype, top_k, counts[0])

    def dispatch(
        self, rows: Activations, choice: Choice, experts: ExpertTables, counts: Sequence[int]
    ) -> Dispatched:
        """Sends rows [T, N] to the ranks that have their experts. Returns the rows of all ranks (`all_to_all.py`)."""
        boxes = self.few_rows.row_boxes
        if boxes is None:
            return dispatch_torch(self, rows, choice, experts, counts)
        return one_shot_all_to_all.dispatch(boxes, rows, choice, experts)

    def combine(self, results: Tensor, sent: Dispatched, counts: Sequence[int]) -> Tensor:
        """Returns the sums [T, N] of own rows over the ranks that have results of them. results [S, N]: of `sent`."""
        boxes = self.few_rows.row_boxes
        if boxes is None:
            return combine_torch(self, results, sent, counts)
        return one_shot_all_to_all.combine(boxes, results, sent)

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Returns the parts [n, ...] that all ranks have for this rank, `counts[r]` rows of rank r. `parts`: one for each
        rank."""
        sent = torch.cat(list(parts))
        received = sent.new_empty(sum(counts), *sent.shape[1:])
        lengths = [len(part) for part in parts]
        _finish(
            self._processes.alltoall_base(received, sent, list(counts), lengths, AllToAllOptions())
        )
        return list(torch.split(received, list(counts)))

    def _boxes(self, x: Tensor, rows: int) -> one_shot.Mailboxes | None:
        """Returns the mailboxes if they serve a call that sends `rows` rows of `x` to each rank."""
        boxes = self.few_rows.boxes
        return boxes if boxes is not None and boxes.serve(x, rows) else None


def _finish(work: Any) -> None:
    """Waits for a collective of gloo. NCCL's return None, or an object for which only the stream waits."""
    if work is not None:
        work.wait()
