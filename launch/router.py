"""`python -m mla_router.launch_router`: only the router, in front of running workers.

The router and its command line are in Rust; this module only calls them.
"""

from __future__ import annotations

import sys

from mla_router.launch.installed import require_router
from mla_router.launch.secrets import hide_keys, warn_of_misspelt_keys
from mla_router.launch.standard_files import open_standard_files
from mla_router.worker.settings import EXIT_BAD_SETTINGS


def main() -> int:
    open_standard_files()
    hide_keys()
    warn_of_misspelt_keys()
    require_router()
    from mla_router._router import run_cli

    try:
        return run_cli(sys.argv[1:])
    except UnicodeEncodeError:
        print("error: a flag has bytes that are not UTF-8", file=sys.stderr)
        return EXIT_BAD_SETTINGS
