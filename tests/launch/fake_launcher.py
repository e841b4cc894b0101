"""`launch_server` with fake workers and quick restarts.

python fake_launcher.py FOLDER [flags of launch_server]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mla_router.launch.server import run
from mla_router.launch.supervisor import RestartPolicy
from mla_router.worker.config import WorkerConfig

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")


def fake_worker(config: WorkerConfig) -> list[str]:
    arguments = [str(config.port), sys.argv[1], str(os.getpid())]
    return [sys.executable, "-u", str(FAKE_WORKER), *arguments]


if __name__ == "__main__":
    policy = RestartPolicy(first_delay_s=0.05, max_delay_s=0.2)
    raise SystemExit(run(sys.argv[2:], command=fake_worker, policy=policy))
