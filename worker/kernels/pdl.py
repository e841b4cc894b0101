"""Programmatic dependent launch (PDL): a kernel starts while the kernel before it on its stream still runs.

A decode step is a chain of kernels of a few microseconds each. Between two of them a GPU is idle for about one
microsecond: it writes back results, notices the end and starts the next kernel. With PDL (CUDA programming guide,
"Programmatic Dependent Launch and Synchronization"; compute capability 9.0 and newer) the next kernel has started
when its predecessor ends. In a captured CUDA graph such a launch is a programmatic edge.

The rule: a kernel launched with `launch_options` calls `wait_for_previous` in every program and on every path, before
it writes memory, before it leaves, and before it reads memory that is neither constant nor settled.

Then the result is the same as without overlap. The wait ends when the predecessor has ended and its writes are visible.
The predecessor has waited for its own predecessor, and so on: all earlier kernels have ended. That covers memory that
an older kernel reads and a newer one overwrites. A kernel without the option (cuBLAS, copies, torch's own) starts when
its predecessor has ended, and is a link of the same chain. So is an event, and therefore work on another stream
(`beside.py`). So is a collective of NCCL (`comm/`), on the same stream: it waits for the kernels before, whose results
it reads, and a kernel after it waits for its end. A kernel breaks the chain if it has the option and does not wait, or
if some of its programs can leave before the wait.

Constant memory is written by no kernel while a model runs: the weights as they were loaded. A `Weight` says whether
it is constant; a dequantized copy is not. A kernel loads a constant weight, or its beginning, to registers before the
wait.

Settled memory was written before the last kernel without the option. Nothing after that kernel starts before it, and
it starts when everything before it has ended. In a step slots, lengths, page table, out_cache_loc, rotations, the
schedule of attention and the cached rows of earlier tokens are settled: all are older than the embedding, which is
torch's kernel. An op with `settled` loads them before the wait. The rows of a request's new tokens are not settled.

A kernel declares both kinds of arguments with `reads_early`. Tests follow each load before the wait to its argument in
the compiled code (`tests/kernels/test_pdl.py`), and look for the kernel between in captured graphs on a GPU
(`tests/gpu/test_launch_order_cuda.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeVar

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, current_target

ENABLED = True  # a bench turns it off for comparison


def launch_options() -> dict[str, bool]:
    """Returns the launch options of a Triton kernel that calls `wait_for_previous`."""
    return {"launch_pdl": ENABLED and _supported()}


@cache
def _supported() -> bool:
    """Whether this process's GPU has PDL. The interpreter has no GPU."""
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch >= 90


Kernel = TypeVar("Kernel")


def reads_early(arguments: Mapping[str, tuple[str, ...]]) -> Callable[[Kernel], Kernel]:
    """Declares the arguments that a kernel may read before it waits, by the constant that allows it:
    `{"AHEAD": ("weight",)}`. A field of a NamedTuple argument is written `argument.field`."""

    def declare(kernel: Kernel) -> Kernel:
        kernel.reads_early = arguments  # type: ignore[attr-defined]
        return kernel

    return declare


@triton.jit
def start_next():
    """Lets the next kernel start once all programs have called it. The kernels of a step of one request begin with it,
    before their early loads: on an H200 the step of V2-Lite is 1.1% shorter in bf16, and in FP8."""
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Waits for the previous kernel to end; a second call does nothing. Lets the next kernel start once all programs
    have come this far or ended, unless they called `start_next`. Several kernels may wait at a time, each for its
    predecessor. The registers that they hold are free: all programs of the kernels before have started."""
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
