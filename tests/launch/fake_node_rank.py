"""The process of a rank on another node, without an engine: it only keeps its heartbeat."""

from __future__ import annotations

import argparse
import time

from mla_router.worker.child import die_with_parent
from mla_router.worker.heartbeat import Heartbeat

HEARTBEAT_S = 0.1

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--rank", "--heartbeat-fd", "--parent-pid"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--session", required=True)
    parser.add_argument("--address", required=True)
    arguments, _ = parser.parse_known_args()
    die_with_parent(arguments.parent_pid)
    leader = Heartbeat(arguments.heartbeat_fd)
    own = leader.of_rank(arguments.rank)
    print(f"fake rank at {arguments.address}: {arguments.session}", flush=True)
    while True:
        if leader.pid and not own.pid:
            own.start()
            print("the fake rank beats", flush=True)
        own.update()
        time.sleep(HEARTBEAT_S)
