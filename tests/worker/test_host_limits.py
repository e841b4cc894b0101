"""Cores and memory within the limits of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mla_router.worker import host_limits
from mla_router.worker.host_limits import usable_cores, usable_memory

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file system of the groups on a machine of 8 cores and 16 GiB."""
    monkeypatch.setattr(host_limits, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(host_limits, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 4 << 20, "SC_PAGE_SIZE": 4096}.get)
    return tmp_path


def write(root: Path, own: str, files: dict[str, str]) -> None:
    (root / "own").write_text(own)
    for name, text in files.items():
        file = root / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


VERSION_1 = "12:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n1:name=systemd:/docker/a\n0::/"


@pytest.mark.parametrize(
    ("own", "files", "cores", "memory"),
    [
        # No limit
        ("", {}, 8, 16 * GIB),
        ("0::/", {}, 8, 16 * GIB),
        ("0::/a", {"a/cpu.max": "max 100000", "a/memory.max": "max"}, 8, 16 * GIB),
        (
            VERSION_1,
            {
                "cpu/docker/a/cpu.cfs_quota_us": "-1",
                "cpu/docker/a/cpu.cfs_period_us": "100000",
                "memory/docker/a/memory.limit_in_bytes": "9223372036854771712",
            },
            8,
            16 * GIB,
        ),
        # The group of a container, which sees it as the root
        ("0::/", {"cpu.max": "250000 100000", "memory.max": str(2 * GIB)}, 2, 2 * GIB),
        ("0::/", {"cpu.max": "50000 100000", "memory.max": str(64 * GIB)}, 1, 16 * GIB),
        # The least of a group and those above it
        (
            "0::/pods/a",
            {
                "pods/cpu.max": "300000 100000",
                "pods/memory.max": str(3 * GIB),
                "pods/a/cpu.max": "400000 100000",
                "pods/a/memory.max": str(4 * GIB),
                "pods/b/memory.max": str(GIB),
            },
            3,
            3 * GIB,
        ),
        (
            VERSION_1,
            {
                "cpu/docker/a/cpu.cfs_quota_us": "400000",
                "cpu/docker/a/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": str(5 * GIB),  # the file system of a container
            },
            4,
            5 * GIB,
        ),
    ],
)
def test_the_smallest_limit_counts(
    root: Path, own: str, files: dict[str, str], cores: int, memory: int
) -> None:
    write(root, own, files)
    assert (usable_cores(), usable_memory()) == (cores, memory)


def test_this_machine_has_cores_and_memory() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
    assert 0 < usable_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
