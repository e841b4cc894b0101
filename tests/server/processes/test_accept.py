"""The connections of a worker at its limit of open files."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.fake_worker import fake_worker
from support.processes import post_json, status_of, wait_until

NOFILE = resource.RLIMIT_NOFILE
SOFT = 256


@contextmanager
def soft_limit(soft: int) -> Iterator[int]:
    """The processes started in this block inherit the limit. Yields the hard limit."""
    before, hard = resource.getrlimit(NOFILE)
    resource.setrlimit(NOFILE, (soft, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(NOFILE, (before, hard))


def test_connections_wait_at_the_limit_and_are_served_later() -> None:
    with soft_limit(SOFT) as hard, fake_worker() as worker, ExitStack() as clients:
        pid = worker.running.pid
        assert resource.prlimit(pid, NOFILE) == (hard, hard), "it is raised"
        open_now = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, NOFILE, (open_now + 10, hard))
        host, _, port = worker.url.removeprefix("http://").rpartition(":")
        for _ in range(30):
            clients.enter_context(socket.create_connection((host, int(port))))
        wait_until(
            lambda: "cannot accept a connection: Too many open files" in worker.running.output(),
            "it reports the limit",
        )
        assert worker.running.output().count("\n") < 100
        clients.close()
        wait_until(lambda: status_of(worker.url + "/health") == 200, "it accepts again")
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        post_json(worker.url + "/generate", body)
