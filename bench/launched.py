"""`launch_server` as a user starts it, for a bench that needs servers of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

START_TIMEOUT = 600.0  # a large checkpoint from a slow disk
STOP_TIMEOUT = 60.0


@contextlib.contextmanager
def launched(flags: list[str], *, workers: int) -> Iterator[str]:
    """URL of a fresh server, when all its workers are in rotation: its `/readiness` is content with one.
    What it printed goes to stderr if anything fails."""
    command = [sys.executable, "-m", "mla_router.launch_server", "--port=0", f"--dp-size={workers}"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
        try:
            yield _url(process, log, workers)
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(process: subprocess.Popen[bytes], log: IO[str], workers: int) -> str:
    """Of the line that it prints when all workers are in rotation."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        # By its descriptor, whose place in the file is the process's, too.
        printed = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")
        if found := re.search(r"^Ready: (\S+)\n", printed, re.MULTILINE):
            return found[1]
        if process.poll() is not None:
            raise RuntimeError(f"launch_server ended with {process.returncode}")
        time.sleep(0.1)
    raise TimeoutError(f"no {workers} workers within {START_TIMEOUT:g} s")
