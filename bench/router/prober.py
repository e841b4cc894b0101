"""Asks light paths ten times a second, until its standard input ends, and prints how it went.

    python bench/router/prober.py HOST PORT PATH ...
    python bench/router/prober.py            # asks nothing: how late is a process that wants to run?

Each probe has a connection of its own, as those of Kubernetes have. Where it may, the prober goes ahead of all other
processes, so that it is not its own delay that is measured; without paths it stays as the router is.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path

PERIOD_S = 0.1
TIMEOUT_S = 10.0


def go_ahead() -> bool:
    """Whether this process now goes first; that needs rights."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        # Where sessions share the machine equally, the niceness of their processes means nothing outside.
        with contextlib.suppress(FileNotFoundError):
            Path("/proc/self/autogroup").write_text("-20")
    except OSError:
        return False
    return True


def ask(host: str, port: int, path: str) -> int:
    """Status of the answer; 0 if there is none."""
    with contextlib.closing(HTTPConnection(host, port, timeout=TIMEOUT_S)) as connection:
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
        except (OSError, HTTPException):
            return 0
    return response.status


def main() -> None:
    paths = sys.argv[3:]
    ahead = bool(paths) and go_ahead()
    late_s: list[float] = []  # from when it wanted to run until it did
    took_s: dict[str, list[float]] = {path: [] for path in paths}
    statuses: list[int] = []
    due = time.monotonic() + PERIOD_S
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        late_s.append(max(0.0, time.monotonic() - due))
        for path in paths:
            begun = time.monotonic()
            statuses.append(ask(sys.argv[1], int(sys.argv[2]), path))
            took_s[path].append(time.monotonic() - begun)
        due = time.monotonic() + PERIOD_S
    print(json.dumps({"ahead": ahead, "late_s": late_s, "took_s": took_s, "statuses": statuses}))


if __name__ == "__main__":
    main()
