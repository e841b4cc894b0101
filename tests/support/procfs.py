"""Processes by /proc: their descendants, their state, and the ports on which they listen.

Tests that kill a program must not rely on that program's own reports.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Pid:
    """A process. Its start time distinguishes it from a later process with the same number."""

    number: int
    started: int  # clock ticks after boot
    parent: int
    command: str

    @property
    def alive(self) -> bool:
        now = _read(self.number)
        return now is not None and now.started == self.started


def _read(number: int) -> Pid | None:
    """Returns the process, or None if it has ended or is a zombie."""
    try:
        stat = _stat(number)
        with open(f"{PROC}/{number}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return None
    state, parent, *rest = stat
    if state in "ZX":
        return None
    words = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return Pid(number, int(rest[17]), int(parent), words)


def _stat(number: int) -> list[str]:
    """Returns the fields after the name, which may have spaces: the state, the parent and more."""
    with open(f"{PROC}/{number}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def _all() -> list[int]:
    return [int(entry) for entry in os.listdir(PROC) if entry.isdigit()]


def descendants(root: int) -> list[Pid]:
    """Returns the descendants of `root`. Parents come before their children."""
    by_parent: dict[int, list[int]] = {}
    for number in _all():
        with contextlib.suppress(OSError):  # the process may end meanwhile
            by_parent.setdefault(int(_stat(number)[1]), []).append(number)
    found: list[Pid] = []
    todo = [root]
    while todo:
        children = [_read(number) for number in by_parent.get(todo.pop(0), [])]
        living = [child for child in children if child is not None]
        found += living
        todo += [child.number for child in living]
    return found


def ignored_signals(number: int) -> set[int]:
    """Returns the signals that a process ignores."""
    status = (PROC / str(number) / "status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return {bit + 1 for bit in range(64) if mask >> bit & 1}


def _open_files(number: int) -> list[str]:
    targets = []
    with contextlib.suppress(OSError):  # the process may end meanwhile
        for handle in (PROC / str(number) / "fd").iterdir():
            with contextlib.suppress(OSError):  # or close the file
                targets.append(os.readlink(handle))
    return targets


def listening_addresses(number: int) -> set[str]:
    """Returns the IP addresses on which a process listens."""
    files = _open_files(number)
    found = set()
    for table in ("net/tcp", "net/tcp6"):
        for line in (PROC / str(number) / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in files:
                found.add(_address(bytes.fromhex(fields[1].partition(":")[0])))
    return found


def _address(shown: bytes) -> str:
    """Returns an address of /proc/net/tcp or tcp6: numbers of four bytes, each in the order of this machine."""
    words = [shown[at : at + 4] for at in range(0, len(shown), 4)]
    order = (word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ipaddress.ip_address(b"".join(order))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def listener(port: int) -> int:
    """Returns the id of the process that listens on this TCP port of an IPv4 address."""
    inodes = set()
    for line in (PROC / "net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        address, state, inode = fields[1], fields[3], fields[9]
        if state == "0A" and int(address.rpartition(":")[2], 16) == port:
            inodes.add(f"socket:[{inode}]")
    for number in _all():
        if not inodes.isdisjoint(_open_files(number)):
            return number
    raise ProcessLookupError(f"no process listens on port {port}")
