"""One division of on-chip memory into L1 cache and shared memory, for all Triton kernels of a process.

By default CUDA chooses the division for each kernel. "Launching a kernel with a different preference than the most
recent preference setting may insert a device-side synchronization point" (CUDA driver API, cuFuncSetCacheConfig):
such a kernel cannot start early (`pdl.py`). In a decode step kernels with little and with much shared memory
alternate, and on an H200 each change costs 2 to 3 us.

All of it becomes shared memory. Kernels that need shared memory lose nothing, and the others stream weights past the
cache. Only kernels whose programs all read the same long rows become slower (`norm_linear.py`).
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

from triton import knobs

logger = logging.getLogger(__name__)

PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of CUfunction_attribute
PERCENT = 100  # of the largest share of shared memory


def prefer_shared_memory() -> None:
    """Applies to kernels that are loaded later. CUDA treats it as a hint. If the call fails, kernels are slower, and a
    warning is logged."""
    knobs.runtime.kernel_load_end_hook.add(_prefer)


def _prefer(_module: int, function: int, name: str, _metadata: Any, _hash: str) -> None:
    code = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(function), PREFERRED_SHARED_MEMORY_CARVEOUT, PERCENT
    )
    if code:
        logger.warning("kernel %s has CUDA's division of on-chip memory: error %d", name, code)
