"""`python -m mla_router.launch_router`: the router alone, in front of workers that run already.

All of it is Rust, its command line included; this is only the way in.
"""

from __future__ import annotations

import sys

from mla_router.launch.installed import require_router
from mla_router.launch.secrets import hide_keys


def main() -> int:
    hide_keys()
    require_router()
    from mla_router._router import run_cli

    return run_cli(sys.argv[1:])
