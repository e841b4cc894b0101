"""Programmatic dependent launch (PDL): a kernel starts while the one before it on its stream still runs.

A decode step is a chain of kernels of a few microseconds each, and between two of them a GPU is idle
for about one: time to write back the results, to notice the end and to start the next. With PDL (CUDA
programming guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0 and
newer) that start is done by the time the predecessor ends. Captured in a CUDA graph such a launch
becomes a programmatic edge, to the same effect.

The rule: a kernel launched with `launch_options` calls `wait_for_previous` before it writes any memory
or leaves, in every program and on every path, and before it reads any but what is constant.

Then it is as if there were no overlap. The wait ends when the predecessor has ended and its writes are
visible; the predecessor had waited for its own, and so on: all that was launched before has
ended, which covers memory to be overwritten that an older kernel reads. A kernel launched
without the option (cuBLAS, copies, torch's own) starts when its predecessor has ended, and is a link
of the same chain. So is an event: it is recorded when the kernel before it has ended, and a kernel after
a wait for it depends on whatever it stands for, so that work on another stream (`beside.py`) begins
and ends as before. What breaks the chain is a kernel with the option that does not wait, or
some of whose programs can leave before.

Constant is what no kernel writes while a model runs: its weights as they were loaded. An op whose weight
may also be the result of a kernel, as dequantized ones are, takes `constant`, which says that it is not; then
its kernel reads the weight, or the beginning of it, to registers while it has nothing else to do than to wait.

Settled is what was written before the last kernel without the option: nothing that comes after that one starts
before it, and it starts when all before it has ended. Of a step these are slots, lengths, page table, locations,
rotations and the schedule of its attention, all older than the embedding, which is torch's. An op that takes
`settled` is told that there is such a kernel between; then its kernel looks them up ahead of the wait, too.

A kernel names both kinds of arguments with `reads_early`. Tests follow each load ahead of the wait to its argument, in
the compiled code (`tests/kernels/test_pdl.py`), and look for the kernel between in recorded graphs, on a GPU
(`tests/gpu/test_launch_order_cuda.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeVar

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, current_target

ENABLED = True  # what a bench turns off to compare


def launch_options() -> dict[str, bool]:
    """Options for the launch of a Triton kernel that calls `wait_for_previous`."""
    return {"launch_pdl": ENABLED and _supported()}


@cache
def _supported() -> bool:
    """Of the GPUs of this process, which are all alike; there is none in the interpreter."""
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch >= 90


Kernel = TypeVar("Kernel")


def reads_early(arguments: Mapping[str, tuple[str, ...]]) -> Callable[[Kernel], Kernel]:
    """Declares which of a kernel's arguments it may read before it waits, for each of its constants that allows it:
    `{"AHEAD": ("weight",)}`. Fields of an argument that is a NamedTuple stand behind its name and a dot."""

    def declare(kernel: Kernel) -> Kernel:
        kernel.reads_early = arguments  # type: ignore[attr-defined]
        return kernel

    return declare


@triton.jit
def wait_for_previous():
    """A second call does nothing. The next kernel may start when all programs have come so far, or ended. So
    several kernels may wait at a time, each for the one before it: that takes registers which nobody else
    needs yet, as all programs of those before it have started."""
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
