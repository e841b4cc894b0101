"""The format of log lines, the same as in the router.

2026-11-24T02:04:10.123456Z  INFO draining: 3 requests are running
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

_LEVELS = {"WARNING": "WARN", "CRITICAL": "ERROR"}


class RouterFormatter(logging.Formatter):
    """Formats lines as the router does."""

    def __init__(self, name: str = "") -> None:
        prefix = f"{name}: " if name else ""
        super().__init__(f"%(asctime)s %(levelname)5s {prefix}%(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        del datefmt
        return timestamp(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.levelname = _LEVELS.get(record.levelname, record.levelname)
        return super().formatMessage(record)


def timestamp(seconds: float) -> str:
    """Formats seconds since 1970 as 2026-11-24T02:04:10.123456Z."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
