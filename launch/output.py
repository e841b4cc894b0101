"""The output of the launcher and its workers: whole lines, each with the name of its process."""

from __future__ import annotations

import io
import logging
import os
import time
from typing import TextIO

from mla_router.worker.logs import RouterFormatter, timestamp

COLOURS = (36, 35, 33, 32, 34, 31)  # ANSI codes, cyclic by worker


class Output:
    """Lines on one stream, in colour on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        if isinstance(stream, io.TextIOWrapper):
            # A worker's line may have characters that the encoding of this process's locale lacks
            stream.reconfigure(errors="backslashreplace")
        self._stream = stream
        self._coloured = stream.isatty()

    def line(self, label: str, text: str, colour: int | None = None) -> None:
        if self._coloured and colour is not None:
            label = f"\033[{COLOURS[colour % len(COLOURS)]}m{label}\033[0m"
        self.plain(f"{label} {text}")

    def worker(self, index: int, text: str) -> None:
        self.line(f"[worker {index}]", text, colour=index)

    def rank(self, rank: int, text: str) -> None:
        self.line(f"[rank {rank}]", text, colour=rank)

    def launch(self, text: str) -> None:
        self.line("[launch]", f"{timestamp(time.time())}  INFO {text}")

    def log(self) -> logging.Handler:
        """Returns a handler for log lines of this process."""
        return _LogLines(self)

    def plain(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:
            # The reader of the output has gone (`| head`). Serving continues without output. The stream leads to
            # /dev/null, so that the interpreter reports no error at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        except OSError:
            pass  # as on a full disk: this line is lost, and a later one is written when there is room again


class _LogLines(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__()
        self.setFormatter(RouterFormatter())
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.line("[launch]", self.format(record))
