"""Weights brought into L2 before the kernel that reads them may begin.

For a few tokens a decode step is a chain of kernels, many of which move next to nothing: while they wait
for each other, device memory is idle. What every token reads (projections, shared experts, not the
routed ones) is known beforehand and can cross over to L2 in that time.

A prefetch reads nothing that a kernel sees, and L2 is where the writes of all multiprocessors meet: a
line that is overwritten after it was fetched is as new as any other. So it may come before
`wait_for_previous`, whoever writes the weights (`pdl.py` has the rule for loads).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from mla_router.worker.kernels.beside import aside
from mla_router.worker.kernels.dispatch import on_gpu

# Not yet measured on a GPU, hence off. Benches set both.
OWN = False  # a kernel fetches its own weights while it waits for its predecessor
MAX_AHEAD_BYTES = 0  # of the weights that `prefetch` fetches; an H200 has 50 MB of L2

MAX_ROWS = 16  # with more tokens the kernels in between keep memory busy
PIECE_BYTES = 16384


def prefetch(x: Tensor, weights: Sequence[Tensor]) -> None:
    """Begins to bring `weights`, contiguous, into L2, as far as MAX_AHEAD_BYTES go, for the T tokens of
    x [T, ...]; nobody waits for it. It runs on the stream of `beside`, whose work comes after it.
    """
    if not MAX_AHEAD_BYTES or not on_gpu(x) or x.shape[0] > MAX_ROWS:
        return
    with aside(x):
        left = MAX_AHEAD_BYTES
        for weight in weights:
            prefetch_triton(weight, min(left, weight.nbytes))
            left -= min(left, weight.nbytes)


def prefetch_triton(weight: Tensor, num_bytes: int) -> None:
    """The first `num_bytes` of it, down to a multiple of 16."""
    assert weight.is_contiguous() and num_bytes <= weight.nbytes, (
        f"weight {tuple(weight.shape)} {weight.stride()}, {num_bytes} bytes"
    )
    if pieces := triton.cdiv(num_bytes // 16 * 16, PIECE_BYTES):
        _prefetch_kernel[(pieces,)](
            weight.view(-1).view(torch.uint8), num_bytes // 16 * 16, PIECE=PIECE_BYTES, num_warps=1
        )


@triton.jit(do_not_specialize=["num_bytes"])
def _prefetch_kernel(data, num_bytes, PIECE: tl.constexpr):
    start = tl.program_id(0) * PIECE
    fetch(data + start, tl.minimum(num_bytes - start, PIECE))


@triton.jit
def fetch(start, num_bytes):
    """From the pointer `start`, a multiple of 16 as num_bytes is, by one thread and one instruction."""
    if cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            """{
                .reg .pred first;
                .reg .b32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 first, thread, 0;
                @first cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [start, num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
