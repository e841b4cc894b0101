"""One division of on-chip memory into L1 cache and shared memory, for all Triton kernels of a process.

A multiprocessor has one at a time, and unless told, CUDA chooses it for each kernel from what that asks for.
"Launching a kernel with a different preference than the most recent preference setting may insert a device-side
synchronization point" (CUDA driver API, cuFuncSetCacheConfig): it cannot start early (`pdl.py`). And a decode
step is a chain of kernels with little and much shared memory in turns; on an H200 such a turn takes 2 to 3 us.

All for shared memory: kernels that need it lose nothing by it, and the others stream weights past the cache.
What loses are kernels all of whose programs read the same long rows (`norm_linear.py`).
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

from triton import knobs

logger = logging.getLogger(__name__)

PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of CUfunction_attribute
PERCENT = 100  # that is shared memory's, of what can be


def prefer_shared_memory() -> None:
    """For kernels that are loaded from now on. CUDA takes it as a wish; where it cannot even be told, kernels
    are slower, and the log says so."""
    knobs.runtime.kernel_load_end_hook.add(_prefer)


def _prefer(_module: int, function: int, name: str, _metadata: Any, _hash: str) -> None:
    code = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(function), PREFERRED_SHARED_MEMORY_CARVEOUT, PERCENT
    )
    if code:
        logger.warning("kernel %s has CUDA's division of on-chip memory: error %d", name, code)
