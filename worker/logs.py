"""The log of a worker's processes."""

from __future__ import annotations

import logging
import sys

from mla_router.worker.log_lines import LogLines


def set_up(level: str, name: str = "") -> None:
    """Writes the log lines of this process from `level` on to stderr. `name`: written before each message."""
    logging.basicConfig(level=level.upper(), handlers=[LogLines(sys.stderr.fileno(), name)])
