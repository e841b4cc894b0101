"""Compiles Triton kernels for the H100 and H200 (sm_90) on a machine without a GPU.

The launches of a launcher are compiled, with its choice of tiles, warps and stages and the alignment of its
arguments, so that the test has no second list of them. A test module has a function that
calls launchers with tensors on the `meta` device, at real shapes:

    def launches() -> None:
        x = torch.empty(128, 2048, dtype=torch.bfloat16, device="meta")
        rms_norm_triton(x, x[0], 1e-6)

    def test_compiled_for_sm_90() -> None:
        for report in compile_sm90(launches):
            report.check()              # no spills, not too much shared memory, the rule of `pdl.py`
            # or more:  assert report.has_wgmma, report

The function must be at the top of its module, which a process without TRITON_INTERPRET imports again
(`compiler_process.py`). There every launch only compiles, each specialization once. Meta tensors have no
values, so a launcher that reads a value (`.item()`) fails.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.compiler_process import compiler_process
from support.early_reads import UNKNOWN, Order, order, parameter_names

MAX_SHARED_BYTES = 232_448  # of one block: 227 KiB
# Limits of a multiprocessor. Registers are allocated in multiples of eight, and a block takes 1 KiB in addition to its
# own memory.
REGISTERS, SHARED_BYTES = 65_536, 228 << 10


@dataclass(frozen=True)
class Report:
    kernel: str
    architecture: int
    constants: dict[str, Any]
    num_warps: int
    registers: int  # of a thread
    spill_bytes: int  # of a thread: its stack, which Triton uses for spills alone
    shared_bytes: int  # of a block
    has_wgmma: bool
    starts_early: bool  # launched while the kernel before it may still run
    waits: bool  # for that kernel to end, before it writes or leaves, on every path
    # Arguments whose memory is read before the wait; UNKNOWN: an address of unknown origin
    reads_early: list[str]
    # Declared by `reads_early` in `pdl.py`, for the constants of this launch
    may_read_early: list[str]

    @property
    def reads_ahead(self) -> bool:
        return bool(self.reads_early)

    def check(self) -> None:
        """Raises AssertionError if the kernel spills, cannot be launched at all, or starts early
        without waiting."""
        assert self.spill_bytes == 0, f"spills: {self}"
        assert self.shared_bytes <= MAX_SHARED_BYTES, f"more shared memory than there is: {self}"
        self.check_order()

    def check_resident(self, programs: int) -> None:
        """Raises AssertionError if fewer than `programs` programs fit into one multiprocessor at a time."""
        threads = 32 * self.num_warps * programs
        assert threads * -(-self.registers // 8) * 8 <= REGISTERS, self
        assert (self.shared_bytes + 1024) * programs <= SHARED_BYTES, self

    def check_order(self) -> None:
        """Raises AssertionError for violations of the launch order. Unlike `check`, it also accepts kernels with spills."""
        if self.starts_early:
            assert self.waits, f"does not wait for the last: {self}"
            undeclared = set(self.reads_early) - set(self.may_read_early)
            assert not undeclared, (
                f"reads {sorted(undeclared)} before it waits for the last: {self}"
            )


def compile_sm90(launches: Callable[[], None]) -> list[Report]:
    """Returns one report for each specialization of a kernel that `launches` launches, in their order.

    Raises CompilationFailed if `launches` raises.
    """
    source = inspect.getsourcefile(launches)
    assert source is not None and "<" not in launches.__qualname__, launches
    fields = compiler_process().call(source, launches.__qualname__)
    assert fields, f"{launches.__qualname__} launched nothing"
    return [Report(**report) for report in fields]


class NoDevice:
    """The part of Triton's driver that a compilation needs. Each architecture has a device, since Triton caches
    compiled kernels by device."""

    architecture = 90

    @staticmethod
    def launcher_cls(source: Any, metadata: Any) -> None:
        """Replaces the launcher: compiled kernels are not launched."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_here(launches: Callable[[], object]) -> list[Report]:
    """`compile_sm90` in this process, which must not interpret, and must not launch kernels later."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: dict[str, Any] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[kernel.hash] = kernel
        return kernel

    driver.set_active(NoDevice())  # type: ignore[no-untyped-call]
    JITFunction.run = compile_only
    try:
        launches()
    finally:
        JITFunction.run = launch
    return [_report(kernel) for kernel in compiled.values()]


def _report(kernel: Any) -> Report:
    from triton import knobs

    cubin = Path(next(p for p in _paths(kernel) if p.endswith(".cubin")))
    os.utime(cubin.parent)  # it is in use (`remove_unused`)
    usage = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-res-usage", cubin],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    constants = {
        _name(kernel.src, path): _plain(value) for path, value in kernel.src.constants.items()
    }
    starts_early = kernel.metadata.launch_pdl
    found_order = order(kernel.asm["ptx"]) if starts_early else Order(False, frozenset())
    names = parameter_names(kernel.src)
    reads = {UNKNOWN if number is None else names[number] for number in found_order.early}
    declared = getattr(kernel.src.fn, "reads_early", {})
    may_read = {
        name for condition in declared if constants.get(condition) for name in declared[condition]
    }
    return Report(
        kernel=kernel.name,
        architecture=kernel.metadata.target.arch,
        constants=constants,
        num_warps=kernel.metadata.num_warps,
        registers=int(found[1]),
        spill_bytes=int(found[2]),
        shared_bytes=kernel.metadata.shared,
        has_wgmma="wgmma.mma_async" in kernel.asm["ptx"],
        starts_early=starts_early,
        waits=found_order.waits,
        reads_early=sorted(reads),
        may_read_early=sorted(may_read),
    )


def _name(source: Any, path: tuple[int, ...]) -> str:
    """Returns the name of an argument, or of a field of a NamedTuple argument."""
    name: str = source.fn.arg_names[path[0]]
    return ".".join((name, *(source.signature[name]._fields[index] for index in path[1:])))


def _plain(value: Any) -> bool | int | float | str:
    value = getattr(value, "value", value)
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _paths(kernel: Any) -> list[str]:
    return [str(path) for path in kernel.metadata_group.values()]
