"""Files that have no end, or are too large."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mla_router.worker.bounded_file import MAX_BYTES, read_bounded


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/", "pipe"])
def test_only_regular_files_are_read(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_bounded(tmp_path / path)  # an absolute path replaces the folder


def test_the_size_is_limited(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert read_bounded(file) == b"abc"
    os.truncate(file, MAX_BYTES + 1)
    with pytest.raises(OSError, match=f"more than {MAX_BYTES} bytes"):
        read_bounded(file)
