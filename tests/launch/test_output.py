"""Output that cannot be written does not stop the launcher."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from mla_router.launch.output import MAX_WAITING, Output

WAIT_S = 60.0


def test_a_full_disk_loses_lines_only() -> None:
    reader, writer = os.pipe()
    with open("/dev/full", "w") as file:
        output = Output(file)
        for number in range(2000):
            output.worker(0, f"lost {number}")
        output.flush(WAIT_S)
        os.dup2(writer, file.fileno())  # there is room again
        output.launch("after")
        output.flush(WAIT_S)
    os.close(writer)
    with os.fdopen(reader) as lines:
        text = lines.read()
    assert text.endswith("after\n")
    assert len(text) < 100_000, "it keeps what it could not write"


def test_characters_that_the_locale_lacks_are_escaped(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w+", encoding="latin-1") as file:
        with Output(file) as output:
            output.worker(0, "é, 50% ███")
        file.seek(0)
        assert file.read() == "[worker 0] é, 50% \\u2588\\u2588\\u2588\n"


def test_a_reader_that_leaves_ends_the_output_only() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        output = Output(file)
        output.plain("read")
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        for _ in range(3):
            output.plain("unread")
        output.flush(WAIT_S)


def test_a_reader_that_pauses_loses_lines_and_stops_nothing() -> None:
    reader, writer = os.pipe()
    text: list[str] = []
    with os.fdopen(reader) as lines:
        reading = threading.Thread(target=lambda: text.extend(lines))
        with os.fdopen(writer, "w") as file:
            output = Output(file)
            for number in range(3 * MAX_WAITING):
                output.plain(f"{number:099}")
            output.flush(0.0)
            reading.start()
            output.flush(WAIT_S)
            output.plain("after")
            output.flush(WAIT_S)
        reading.join()
    assert text[-1] == "after\n"
    losses = [int(found[1]) for line in text if (found := re.search(r"(\d+) lines .* lost", line))]
    assert losses
    assert len(text) - 1 - len(losses) + sum(losses) == 3 * MAX_WAITING
