"""The load of a profile-guided build: `make wheel PGO=1` runs this with a router that counts how often each branch is taken.

maturin installs that router in a virtual environment, and names its `mla-router` in PATH. The load is that of
`overhead.py`, with clients that leave. The router writes its counts when it ends by itself.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import tempfile
from pathlib import Path

from overhead import case, load
from peers import CHAT, RELEASE, free_port, ours, running, until_ready
from record import ROOT

CASES = (
    *(case(size, connections) for size in (2048, 16384) for connections in (32, 256)),
    case(2048, 1),
    case(2048, 32, "cold"),
    case(2048, 32, "stream"),
    case(16384, 32, "stream"),
)
SECONDS = 3.0
WORKERS = 4
LEAVING = 300
STREAM = b'{"model":"mock","messages":[{"role":"user","content":"hello"}],"stream":true}'


def leave(port: int, begun: bool) -> None:
    """Asks for a stream, and closes the connection before it has begun or before it has ended."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
        client.request("POST", CHAT, STREAM, {"Content-Type": "application/json"})
        if begun:
            client.getresponse().read(1)


def main() -> None:
    build = ["cargo", "build", "--release", "--locked", "-p", "mla-mock-worker", "--bins"]
    subprocess.run(build, check=True, cwd=ROOT)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="train-")))
        first, port = free_port(WORKERS), free_port()
        stack.enter_context(running([RELEASE / "instant_worker", str(first), str(WORKERS)]))
        until_ready(first)
        urls = [f"http://127.0.0.1:{first + i}" for i in range(WORKERS)]
        command = ours("cache_aware", binary=Path("mla-router")).command(port, urls)
        router = stack.enter_context(running(command, folder / "router.log"))
        until_ready(port, urls)
        for one in CASES:
            print(one, load(port, router, one, SECONDS), flush=True)
        for number in range(LEAVING):
            leave(port, begun=number % 2 == 1)
        os.kill(router, signal.SIGTERM)
        os.waitid(os.P_PID, router, os.WEXITED | os.WNOWAIT)


if __name__ == "__main__":
    main()
