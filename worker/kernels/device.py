"""Limits of the GPU, by which tilings are chosen. They are read once.

A tiling of attention is the first candidate that is legal on the device (`first_legal`). Candidates are ordered by their
speed on an H200 or an H100. Later candidates serve smaller chips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

# Shared memory that each block takes beside its own
BLOCK_OVERHEAD = 1024
OLDEST = 80  # tensor cores that multiply bfloat16, and asynchronous copies to shared memory
FIRST_WITH_E4M3 = 89
NEWEST = 109  # tests compile for the families up to this one

Candidate = TypeVar("Candidate")


class UnsupportedDevice(Exception):
    """The device cannot run a kernel, for the reason in the text."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one kind of GPU."""

    architecture: int  # compute capability times 10: 90 on an H200
    multiprocessors: int
    shared_bytes: int  # shared memory of a block
    multiprocessor_shared_bytes: int
    registers: int  # 32-bit registers of a multiprocessor

    @property
    def is_hopper(self) -> bool:
        """Whether the GPU runs Gluon kernels for sm_90."""
        return self.architecture // 10 == 9

    @property
    def has_tensor_memory_accelerator(self) -> bool:
        return self.architecture >= 90

    @property
    def converts_e4m3(self) -> bool:
        """Whether the GPU converts to and from E4M3. E5M2 is the upper half of float16, which all have."""
        return self.architecture >= FIRST_WITH_E4M3

    @property
    def has_tensor_memory(self) -> bool:
        """Whether products of 64 rows and more are summed in tensor memory (sm_100). It has no room for 64 x 512 sums
        beside the scores: Triton compiles such a kernel to a trap."""
        return self.architecture >= 100

    def resident(self, shared_bytes: int) -> int:
        """Returns the number of blocks with `shared_bytes` each that fit a multiprocessor."""
        return self.multiprocessor_shared_bytes // (shared_bytes + BLOCK_OVERHEAD)


H200 = Limits(90, 132, 232_448, 233_472, 65_536)
# For the interpreter, and for compilation without a GPU. Few programs run at a time, so that each has several
# tiles in tests.
NO_GPU = Limits(90, 4, 232_448, 233_472, 65_536)


def limits(device: torch.device) -> Limits:
    """Returns the limits of `device`: NO_GPU if it is not a GPU."""
    return _read(device) if device.type == "cuda" else NO_GPU


@cache
def _read(device: torch.device) -> Limits:
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack some fields
    return Limits(
        architecture=10 * found.major + found.minor,
        multiprocessors=found.multi_processor_count,
        shared_bytes=found.shared_memory_per_block_optin,
        multiprocessor_shared_bytes=found.shared_memory_per_multiprocessor,
        registers=found.regs_per_multiprocessor,
    )


def check_architecture(found: Limits) -> None:
    """Raises UnsupportedDevice for a GPU older or newer than those that the kernels are compiled for."""
    if not OLDEST <= found.architecture <= NEWEST:
        raise UnsupportedDevice(
            f"compute capability {found.architecture / 10}: kernels are for {OLDEST / 10} to {NEWEST / 10}"
        )


def first_legal(
    name: str,
    candidates: Iterable[Candidate],
    shared_bytes: Callable[[Candidate], int],
    found: Limits,
) -> Candidate:
    """Returns the first of `candidates` whose shared memory is within the limit of a block. Raises UnsupportedDevice if
    there is none."""
    smallest = None
    for candidate in candidates:
        needed = shared_bytes(candidate)
        if needed <= found.shared_bytes:
            return candidate
        smallest = needed if smallest is None else min(smallest, needed)
    raise UnsupportedDevice(
        f"{name} needs {smallest} bytes of shared memory in a block, the device has {found.shared_bytes}"
    )
