"""`launch_server` of a node other than 0, with fake ranks and quick restarts.

python fake_node.py [flags of launch_server]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mla_router.launch.server import run
from mla_router.launch.supervisor import RestartPolicy
from mla_router.worker.config import WorkerConfig

FAKE_RANK = Path(__file__).with_name("fake_node_rank.py")


def fake_rank(config: WorkerConfig, rank: int) -> list[str]:  # noqa: ARG001 (of `RankCommand`)
    arguments = [f"--rank={rank}", f"--parent-pid={os.getpid()}"]
    return [sys.executable, "-u", str(FAKE_RANK), *arguments]


if __name__ == "__main__":
    policy = RestartPolicy(first_delay_s=0.05, max_delay_s=0.2)
    raise SystemExit(run(sys.argv[1:], policy=policy, rank=fake_rank))
