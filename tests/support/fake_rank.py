"""The process of a rank without an engine: it only keeps its heartbeat."""

from __future__ import annotations

import argparse
import time

from mla_router.worker.child import die_with_parent
from mla_router.worker.heartbeat import Heartbeat

HEARTBEAT_S = 0.1

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--rank", "--heartbeat-fd", "--store-fd", "--masks-fd", "--parent-pid"):
        parser.add_argument(flag, type=int, required=True)
    arguments, _ = parser.parse_known_args()
    die_with_parent(arguments.parent_pid)
    heartbeat = Heartbeat(arguments.heartbeat_fd, arguments.rank)
    heartbeat.start()
    while True:
        heartbeat.update()
        time.sleep(HEARTBEAT_S)
