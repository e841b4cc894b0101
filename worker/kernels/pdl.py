"""Programmatic dependent launch (PDL): a kernel starts while the one before it on its stream still runs.

A decode step is a chain of kernels of a few microseconds each, and between two of them a GPU is idle
for about one: time to write back the results, to notice the end and to start the next. With PDL (CUDA
programming guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0 and
newer) that start is done by the time the predecessor ends. Captured in a CUDA graph such a launch
becomes a programmatic edge, to the same effect.

The rule: a kernel launched with `launch_options` calls `wait_for_previous` before it reads or writes any
memory, in every program and on every path.

Then it is as if there were no overlap. The wait ends when the predecessor has ended and its writes are
visible; the predecessor had waited for its own, and so on: all that was launched before has
ended, which covers memory to be overwritten that an older kernel reads. A kernel launched
without the option (cuBLAS, copies, torch's own) starts when its predecessor has ended, and is a link
of the same chain. So is an event: it is recorded when the kernel before it has ended, and a kernel after
a wait for it depends on whatever it stands for, so that work on another stream (`beside.py`) begins
and ends as before. What breaks the chain is a kernel with the option that does not wait, or
some of whose programs can leave before. Weights are not read ahead of the wait either: they may be the
result of a kernel, as dequantized ones are.
"""

from __future__ import annotations

from functools import cache

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


@triton.jit
def wait_for_previous():
    """To be called first. The next kernel may start as soon as all programs have come so far: earlier,
    kernels that only wait would pile up on the multiprocessors."""
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
