"""Log lines whose reader pauses, leaves, or is slow."""

from __future__ import annotations

import logging
import os
import pty
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mla_router.worker.log_lines import LogLines
from support.processes import EVENT_TIMEOUT_S, ROOT

COUNT = 1000  # lines of 1000 bytes: more than a pipe, a socket or a terminal holds


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("any", logging.INFO, "", 0, text, (), None)


def ends_of(kind: str) -> tuple[int, int]:
    """Returns the descriptors of a reader and a writer."""
    if kind == "pipe":
        return os.pipe()
    if kind == "terminal":
        return pty.openpty()
    reader, writer = socket.socketpair()
    return reader.detach(), writer.detach()


def read_all(descriptor: int) -> list[str]:
    """Returns the lines that are there."""
    data = b""
    while select.select([descriptor], [], [], 0.1)[0]:
        data += os.read(descriptor, 1 << 20)
    return data.decode().replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize("kind", ["pipe", "terminal", "socket"])
def test_a_reader_that_pauses_loses_lines_and_stops_nothing(kind: str) -> None:
    reader, writer = ends_of(kind)
    lines = LogLines(writer)
    assert os.get_blocking(writer), "other programs have the same open file"
    for number in range(COUNT):
        lines.emit(record(f"{number:04}" + "x" * 1000))
    kept = [line for line in read_all(reader) if line.endswith("x")]
    assert 0 < len(kept) < COUNT
    lines.emit(record("it reads again"))
    *_, lost, last = read_all(reader)
    whole = sum(len(line) == len(kept[0]) for line in kept)
    assert f"WARN {COUNT - whole} log lines are lost: their reader has paused" in lost
    assert last.endswith("INFO it reads again")
    lines.emit(record("once more"))
    (again,) = read_all(reader)
    assert again.endswith("INFO once more")
    os.close(reader)
    os.close(writer)


def test_a_process_does_not_wait_for_the_reader_of_its_log() -> None:
    code = "import logging; from mla_router.worker import logs; logs.set_up('info'); "
    code += f"[logging.info('x' * 1000) for _ in range({COUNT})]"
    environment = {"PYTHONPATH": str(ROOT / "python")}
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.wait(EVENT_TIMEOUT_S) == 0


def test_without_a_reader_nothing_is_raised() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    LogLines(writer).emit(record("lost"))
    os.close(writer)


def test_lines_of_a_file_are_appended(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        file.write(b"before\n")
        file.flush()
        LogLines(file.fileno()).emit(record("behind"))
    before, behind = (tmp_path / "log").read_text().splitlines()
    assert (before, behind[-6:]) == ("before", "behind")
