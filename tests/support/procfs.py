"""What /proc says about processes: who descends from whom, who is alive, who listens on a port.

Tests that kill things must not trust what the killed program says about itself.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Pid:
    """A process; the start time tells it from a later one that was given the same number."""

    number: int
    started: int  # clock ticks after boot
    parent: int
    command: str

    @property
    def alive(self) -> bool:
        now = _read(self.number)
        return now is not None and now.started == self.started


def _read(number: int) -> Pid | None:
    """The process, or None if it is gone or a zombie: dead and only waiting for its parent."""
    try:
        stat = (PROC / str(number) / "stat").read_text()
        command = (PROC / str(number) / "cmdline").read_bytes()
    except OSError:
        return None
    state, parent, *rest = stat.rpartition(")")[2].split()  # the name before it may hold blanks
    if state in "ZX":
        return None
    words = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return Pid(number, int(rest[17]), int(parent), words)


def _all() -> list[Pid]:
    numbers = (int(entry) for entry in os.listdir(PROC) if entry.isdigit())
    return [pid for number in numbers if (pid := _read(number)) is not None]


def descendants(root: int) -> list[Pid]:
    """Children of `root`, their children and so on; parents come before their children."""
    by_parent: dict[int, list[Pid]] = {}
    for pid in _all():
        by_parent.setdefault(pid.parent, []).append(pid)
    found: list[Pid] = []
    todo = [root]
    while todo:
        children = by_parent.get(todo.pop(0), [])
        found += children
        todo += [child.number for child in children]
    return found


def _open_files(number: int) -> list[str]:
    targets = []
    with contextlib.suppress(OSError):  # it may end while it is looked at
        for handle in (PROC / str(number) / "fd").iterdir():
            with contextlib.suppress(OSError):  # or close this file
                targets.append(os.readlink(handle))
    return targets


def listener(port: int) -> int:
    """Number of the process that listens on this TCP port of an IPv4 address."""
    inodes = set()
    for line in (PROC / "net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        address, state, inode = fields[1], fields[3], fields[9]
        if state == "0A" and int(address.rpartition(":")[2], 16) == port:
            inodes.add(f"socket:[{inode}]")
    for pid in _all():
        if not inodes.isdisjoint(_open_files(pid.number)):
            return pid.number
    raise ProcessLookupError(f"no process listens on port {port}")
