"""Hides keys in arguments from other users of the machine, and names misspelt variables of keys.

Every user can read the arguments of every process (`ps`, /proc/PID/cmdline), so keys belong in the environment. Keys in
arguments are overwritten at the start, in the memory that the kernel shows.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mla_router.worker.config import misspelt_keys

KEY_FLAG = re.compile(rb"--[a-z-]*-key")  # --api-key, --admin-api-key and the like
# Indices of fields of /proc/self/stat after the program's name, which may contain blanks: see proc(5).
_ARG_START, _ARG_END = 48 - 3, 49 - 3


def hide_keys() -> None:
    """Overwrites the values of flags that end in `-key` with stars, in the arguments that the kernel shows.

    The interpreter has its own copy. Does nothing if the kernel does not report the address of the arguments.
    """
    shown = Path("/proc/self/cmdline").read_bytes()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if start == 0 or end - start != len(shown):
        return
    for at, length in _values(shown.split(b"\0")):
        ctypes.memset(start + at, ord("*"), length)


def _values(arguments: list[bytes]) -> Iterator[tuple[int, int]]:
    """Yields offset and length of each key."""
    at, is_key = 0, False
    for argument in arguments:
        flag, equals, value = argument.partition(b"=")
        if argument.startswith(b"--"):
            is_key = KEY_FLAG.fullmatch(flag) is not None
            if is_key and equals:
                yield at + len(flag) + 1, len(value)
        elif is_key:
            yield at, len(argument)
        at += len(argument) + 1


def warn_of_misspelt_keys() -> None:
    """Names variables such as MLA_ROUTER_APIKEY on stderr: without the intended key, a server is open."""
    for name, meant in misspelt_keys().items():
        print(f"warning: nothing reads {name}; did you mean {meant}?", file=sys.stderr)


class HeaderFile:
    """A file with the header of a key, for `curl -H @PATH`. It is in memory, only this user can read it, and it ends
    with this process. So the key is neither in the output nor in curl's arguments."""

    def __init__(self, key: str) -> None:
        self._file = os.memfd_create("authorization")
        os.fchmod(self._file, 0o400)
        os.write(self._file, f"Authorization: Bearer {key}\n".encode())

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"
