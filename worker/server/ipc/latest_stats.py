"""The last statistics that an API process has received of its scheduler."""

from __future__ import annotations

import time

from mla_router.worker.messages import Stats
from mla_router.worker.server.ipc.shared_counters import Cells

# Minimum seconds between the statistics that give a throughput. They arrive every 0.5 s.
THROUGHPUT_WINDOW = 0.4


class LatestStats:
    """The statistics are also a heartbeat: their age shows whether the scheduler and this process work."""

    def __init__(self, received_at: Cells) -> None:
        """`received_at`: the time of the last statistics in each API process, by the monotonic clock."""
        self._received_at = received_at
        self._since: tuple[float, int] | None = None  # time and generated tokens
        self.value: Stats | None = None
        self.throughput = 0.0  # generated tokens per second over the last half second or so

    def update(self, stats: Stats) -> None:
        self._received_at.own[0] = now = time.monotonic()
        self.value = stats
        if self._since is None:
            self._since = (now, stats.generated_tokens)
        elif (seconds := now - self._since[0]) >= THROUGHPUT_WINDOW:
            self.throughput = (stats.generated_tokens - self._since[1]) / seconds
            self._since = (now, stats.generated_tokens)

    @property
    def age(self) -> float:
        """The seconds since the last statistics in this API process."""
        return time.monotonic() - self._received_at.own[0]

    @property
    def oldest_age(self) -> float:
        """The seconds since the last statistics, in the API process where they are oldest: one stuck process makes the
        worker unhealthy."""
        return time.monotonic() - self._received_at.lowest()
