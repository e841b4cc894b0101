"""An extra API process of a worker. The first API process starts it:

python -m mla_router.worker.server [flags of a worker] --ipc-dir DIR --parent-pid PID --number N ...
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from pathlib import Path

import msgspec
from setproctitle import setproctitle

from mla_router.worker import flags
from mla_router.worker.child import die_with_parent, ignore_stop_signals
from mla_router.worker.server.processes.setup import set_up


def main() -> int:
    ignore_stop_signals()
    parser = argparse.ArgumentParser(prog="mla_router.worker.server")
    parser.add_argument("--ipc-dir", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--start-info", required=True)
    parser.add_argument("--listener-fd", type=int, required=True)
    parser.add_argument("--counters-fd", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)  # of the ranks
    parser.add_argument("--own-heartbeat-fd", type=int, required=True)  # of the API processes
    flags.add_flags(parser)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    config = flags.from_namespace(arguments)
    set_up(config)
    setproctitle(f"mla_router server {config.name} {arguments.number}")

    from mla_router.worker.heartbeat import Heartbeat
    from mla_router.worker.server.ipc.shared_counters import SharedCounters
    from mla_router.worker.server.processes import extra
    from mla_router.worker.server.state import ServerState, StartInfo

    number, servers = arguments.number, config.tokenizer_worker_num
    state = ServerState(
        config,
        msgspec.json.decode(arguments.start_info, type=StartInfo),
        SharedCounters(arguments.counters_fd, servers, number),
        Heartbeat(arguments.heartbeat_fd, config.ranks.start),
        Heartbeat(arguments.own_heartbeat_fd, number),
    )
    with socket.socket(fileno=arguments.listener_fd) as listener:
        return asyncio.run(extra.run(state, number, listener, arguments.ipc_dir))


if __name__ == "__main__":
    sys.exit(main())
