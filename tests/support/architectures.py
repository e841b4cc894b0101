"""GPUs other than the H200, for which kernels are compiled without a GPU.

    def launches() -> None:
        for limits in OTHERS:
            with compiling_for(limits):
                rms_norm_triton(...)

The function `launches`, which `sm90.py` compiles, may call launchers in this way. They choose their tilings by the
limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from mla_router.worker.kernels import device, pdl
from mla_router.worker.kernels.device import H200, Limits
from support.sm90 import NoDevice

A100 = Limits(80, 108, 166_912, 167_936, 65_536)
L40S = Limits(89, 142, 101_376, 102_400, 65_536)
B200 = Limits(100, 148, 232_448, 233_472, 65_536)
OTHERS = (A100, L40S, B200)
LIMITS = {limits.architecture: limits for limits in (*OTHERS, H200)}


@contextmanager
def compiling_for(limits: Limits) -> Iterator[None]:
    with (
        patch.object(device, "NO_GPU", limits),
        patch.object(NoDevice, "architecture", limits.architecture),
    ):
        pdl._supported.cache_clear()  # it asks Triton once a process
        yield
    pdl._supported.cache_clear()
