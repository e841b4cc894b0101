"""`python -m mla_router.launch_worker`: one worker without a router, the same as `-m mla_router.worker`."""

from __future__ import annotations

from mla_router.launch.installed import require_worker
from mla_router.launch.secrets import hide_keys, warn_of_misspelt_keys
from mla_router.launch.signals import KILLED_BY_CTRL_C
from mla_router.launch.standard_files import open_standard_files


def main() -> int:
    open_standard_files()
    hide_keys()
    warn_of_misspelt_keys()
    require_worker()
    from mla_router.worker.__main__ import main as worker_main

    try:
        return worker_main()
    except KeyboardInterrupt:  # before the worker handles signals, as during a download
        return KILLED_BY_CTRL_C
