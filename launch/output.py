"""The output of the launcher and its workers: whole lines, each with the name of its process.

A thread writes them. A reader that pauses, such as a stopped terminal or a stuck log collector, must not stop the launcher:
it restarts workers, and reads their output, without which they would stop as well.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import threading
import time
from types import TracebackType
from typing import Self, TextIO

from mla_router.worker.log_format import RouterFormatter, timestamp

MAX_WAITING = 4096  # lines; further ones are lost
FLUSH_S = 1.0  # time for the remaining lines at the end

COLOURS = (36, 35, 33, 32, 34, 31)  # ANSI codes, cyclic by worker


class Output:
    """Lines on one stream, in colour on a terminal. At the end of the `with` block they are written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._coloured = stream.isatty()
        self._waiting: queue.Queue[str | threading.Event] = queue.Queue(MAX_WAITING)
        self._lost = 0  # lines so far
        # Streams without a file descriptor, such as those of tests and actors, never wait
        self._has_thread = isinstance(stream, io.TextIOWrapper)
        if self._has_thread:
            threading.Thread(target=self._write_lines, name="output", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, error, traceback
        self.flush(FLUSH_S)

    def flush(self, timeout_s: float) -> None:
        """Waits until the lines so far are written, if the reader reads them in time."""
        written = threading.Event()
        if self._has_thread:
            with contextlib.suppress(queue.Full):
                self._waiting.put(written, timeout=timeout_s)
                written.wait(timeout_s)

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
        if not self._has_thread:
            print(text, file=self._stream, flush=True)
            return
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self._lost += 1

    def _write_lines(self) -> None:
        reported = 0
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._write(item)
            if lost := self._lost - reported:
                reported += lost
                reason = f"{lost} lines of output are lost: their reader has paused"
                self._write(f"[launch] {timestamp(time.time())}  WARN {reason}")

    def _write(self, text: str) -> None:
        # Not through the stream: the interpreter waits for its lock at the end. A worker's line may have characters that
        # the encoding of this process's locale lacks
        data, stream = f"{text}\n".encode(self._stream.encoding, "backslashreplace"), self._stream
        try:
            while data:
                data = data[os.write(stream.fileno(), data) :]
        except BrokenPipeError:
            # The reader of the output has gone (`| head`). Serving continues without output. The stream leads to
            # /dev/null, so that the interpreter reports no error at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except OSError:
            pass  # as on a full disk: this line is lost, and a later one is written when there is room again


class _LogLines(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__()
        self.setFormatter(RouterFormatter())
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.line("[launch]", self.format(record))
