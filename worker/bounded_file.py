"""Reads files that the operator has named."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

# A larger file is not what the operator has meant.
MAX_BYTES = 16 << 20


def read_bounded(path: Path) -> bytes:
    """Returns the content. Raises OSError; also if the file is not a regular one, because the read of a pipe or device may
    never end, or has more than MAX_BYTES."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_BYTES} bytes")
    return content
