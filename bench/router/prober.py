"""Requests paths ten times a second until its standard input ends, and prints the latencies.

    python bench/router/prober.py HOST PORT PATH ...
    python bench/router/prober.py            # asks nothing: how late is a process that wants to run?

Each probe has its own connection, as in Kubernetes. If permitted, the prober raises its priority, so that its own
delay is not measured. Without paths it keeps the router's priority.
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
    """Raises the priority of this process. Returns whether that was permitted."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        # With autogroup scheduling the niceness of a process counts only within its session.
        with contextlib.suppress(FileNotFoundError):
            Path("/proc/self/autogroup").write_text("-20")
    except OSError:
        return False
    return True


def ask(host: str, port: int, path: str) -> int:
    """Returns the status of the answer; 0 without an answer."""
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
    late_s: list[float] = []  # delays from the planned to the actual time of running
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
