"""Runs `launch_server` for a bench that needs its own servers."""

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
    """Starts a server and yields its URL when all its workers are in rotation; `/readiness` needs only one. After a
    failure its output goes to stderr."""
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
    """Returns the URL in the line that the server prints when all workers are in rotation."""
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
