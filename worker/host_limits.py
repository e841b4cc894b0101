"""Cores and memory of this machine that a process may use, within the limits of its control groups.

A container sees all cores and the whole memory of its machine. Its limits are in the control groups of the process and
in those above it: `cpu.max` and `memory.max` in version 2, `cpu.cfs_quota_us` and `memory.limit_in_bytes` in version 1
(https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Returns the number of cores: those that the process may run on, or the whole cores of a smaller quota of CPU time.
    At least 1."""
    cores = len(os.sched_getaffinity(0))
    for group in _groups("cpu"):
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if both := _read(group / "cpu.max"):
            quota, _, period = both.partition(" ")
        if _is_limit(quota) and _is_limit(period):
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def usable_memory() -> int:
    """Returns the bytes of memory: those of the machine, or a smaller limit."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(group / name)
            if _is_limit(limit):
                memory = min(memory, int(limit))
    return memory


def _groups(controller: str) -> Iterator[Path]:
    """Yields the folders of the groups of this process and of those above them. In a container, some may not exist: its
    file system may begin with its own group."""
    for line in _read(OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):
            yield ROOT / (controller if controllers else "") / folder


def _read(file: Path) -> str:
    """Returns the text of a file, empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _is_limit(text: str) -> bool:
    """Returns whether a text is a number, and not `max`, `-1` or empty."""
    return text.isdecimal() and int(text) > 0
