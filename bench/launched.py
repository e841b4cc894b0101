"""`launch_server` as a user starts it, for a bench that needs servers of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator

START_TIMEOUT = 600.0  # a large checkpoint from a slow disk
STOP_TIMEOUT = 60.0


@contextlib.contextmanager
def launched(flags: list[str], *, workers: int) -> Iterator[str]:
    """URL of a fresh server, when all its workers are in rotation: its `/readiness` is content with one.
    What it printed goes to stderr if anything fails."""
    port, base_port = free_port(), free_port()
    ports = ["--port", str(port), "--router-dp-worker-base-port", str(base_port)]
    command = [sys.executable, "-m", "mla_router.launch_server", "--dp-size", str(workers)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *ports, *flags], stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(process, url, workers)
            yield url
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(process: subprocess.Popen[bytes], url: str, workers: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"launch_server ended with {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/workers") as answer:
            known = json.load(answer)["workers"]
            if sum(worker["healthy"] for worker in known) == workers:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url}: no {workers} workers within {START_TIMEOUT:g} s")
