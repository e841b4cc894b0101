"""Reads files that the operator has named."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# A larger file is not what the operator has meant.
MAX_BYTES = 16 << 20


def read_bounded(path: Path) -> bytes:
    """Returns the content. Raises OSError, as `check_bounded` does."""
    check_bounded(path)
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:  # it grows, or is of a file system without sizes, such as proc
        raise OSError(errno.EFBIG, f"more than {MAX_BYTES} bytes")
    return content


def check_bounded(path: Path, max_bytes: int = MAX_BYTES) -> None:
    """Raises OSError if this process cannot read the file, if it is not a regular one, because the read of a pipe or device
    may never end, or if it has more than `max_bytes`."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if status.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes")
    if not os.access(path, os.R_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
