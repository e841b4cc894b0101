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
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.quantize import quantize_rows


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


def quantized_rows(rows: Tensor, experts: int) -> tuple[Tensor, ...]:
    """Returns what other ranks send if they send `rows` quantized: values, scales, and logits of so many experts."""
    quantized = quantize_rows(rows, torch.float8_e4m3fn)
    logits = torch.randn(len(rows), experts, device=rows.device)
    return quantized.values.view(torch.uint8), quantized.scales.contiguous(), logits


class LoopbackGroup(Group):
    """Rank 0 of `size` ranks without the others."""

    def __init__(self, size: int, link: Link, *rows: Tensor) -> None:
        """`rows`: of all ranks, for gathers of rows of each dtype and width."""
        super().__init__(0, size, object())
        self.link = link
        self.waited_s = 0.0  # modelled time of all calls so far; a replayed graph makes none
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
        own, total = len(parts[0]), sum(counts)
        assert own == counts[0] <= self._most, f"{own} rows, {counts=}, {self._most=}"
        start = self._most - own
        gathered = [self._rows[x.dtype, x.shape[1]][start : start + total] for x in parts]
        for x, rows in zip(parts, gathered, strict=True):
            rows[:own] = x
        nbytes = sum(rows.nbytes for rows in gathered)
        self._wait(parts[0], self.link.gather_s(nbytes, self.size))
        return gathered

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
