"""Detects a frozen scheduler, or another frozen rank of its worker, in about a second.

On a busy machine the heartbeat of a healthy scheduler may be late, because it waits for a core. So a late heartbeat
alone proves nothing. A scheduler without a heartbeat is frozen if its process is stopped by a signal, if for a second
none of its threads ran or could run, or if it computed for much longer than its steps should take.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mla_router.worker.heartbeat import Heartbeat

# After this many times --watchdog-timeout without a heartbeat a process is killed: a hung GPU does not recover.
STUCK_FACTOR = 4

CHECK_PERIOD_S = 0.2  # between two checks
FROZEN_S = 1.0  # without a heartbeat, for a process that does nothing
STOPPED_S = 0.4  # for a process that is stopped by a signal
# Limit of the CPU time of the scheduler's thread without a heartbeat: HUNG_CPU_S, or CPU_TIME_FACTOR times the expected
# time of the running steps. A thread that polls a GPU uses CPU time, too. Time that other processes take does not count.
HUNG_CPU_S = 1.8
CPU_TIME_FACTOR = 4.0
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Activity:
    """The state of a process, from /proc."""

    is_stopped: bool  # by a signal, or a debugger
    wants_to_run: bool  # a thread runs, waits for a core or for a disk
    cpu_s: float  # of all threads
    main_cpu_s: float  # of the first thread


def activity(pid: int) -> Activity | None:
    """Returns the activity of process `pid`; None if it does not exist."""
    try:
        process = _fields(Path(f"/proc/{pid}/stat"))
        threads = [_fields(path / "stat") for path in Path(f"/proc/{pid}/task").iterdir()]
        main = _fields(Path(f"/proc/{pid}/task/{pid}/stat"))
    except OSError:  # the process or one of its threads has just ended
        return None
    return Activity(
        is_stopped=process[0] in "Tt",
        wants_to_run=any(thread[0] in "RD" for thread in threads),
        cpu_s=_cpu_s(process),
        main_cpu_s=_cpu_s(main),
    )


class HeartbeatWatch:
    """Watches the heartbeat of a rank, and the activity of its process while the heartbeat does not change."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._count = heartbeat.count
        self._checked = time.monotonic()
        self._since: Activity | None = None  # at the first check without a heartbeat
        self._before: Activity | None = None  # at the last check
        self._still_s = 0.0
        self._stopped_s = 0.0

    @property
    def is_frozen(self) -> bool:
        return (
            self._still_s >= FROZEN_S or self._stopped_s >= STOPPED_S or self._is_hung
        ) and self._heartbeat.count == self._count

    @property
    def _is_hung(self) -> bool:
        if self._since is None or self._before is None:
            return False
        computed_s = self._before.main_cpu_s - self._since.main_cpu_s
        return computed_s >= max(HUNG_CPU_S, CPU_TIME_FACTOR * self._heartbeat.expected_s)

    def check(self, now: float) -> None:
        """Updates the state at monotonic time `now`. Call it every CHECK_PERIOD_S seconds."""
        # If this process itself was stopped, it has not observed the time since its last check.
        passed, self._checked = min(now - self._checked, 2 * CHECK_PERIOD_S), now
        count = self._heartbeat.count
        if count != self._count or not self._heartbeat.pid:
            self._count = count
            self._since = self._before = None
            self._still_s = self._stopped_s = 0.0
            return
        found = activity(self._heartbeat.pid)
        if found is None:
            return  # the parent process notices its death
        before, self._before = self._before, found
        self._stopped_s = self._stopped_s + passed if found.is_stopped else 0.0
        if self._heartbeat.is_paused:
            self._since, self._still_s = None, 0.0
            return
        self._since = self._since or found
        moved = before is None or found.cpu_s != before.cpu_s or found.wants_to_run
        self._still_s = 0.0 if moved else self._still_s + passed


class RanksWatch:
    """Watches the heartbeats of all ranks of a worker."""

    def __init__(self, heartbeats: Sequence[Heartbeat]) -> None:
        self._heartbeats = heartbeats
        self._watches = [HeartbeatWatch(heartbeat) for heartbeat in heartbeats]

    @property
    def is_frozen(self) -> bool:
        return any(watch.is_frozen for watch in self._watches) or any(
            heartbeat.is_reported_frozen for heartbeat in self._heartbeats
        )

    async def run(self) -> None:
        """Checks every CHECK_PERIOD_S seconds until it is cancelled."""
        while True:
            now = time.monotonic()
            for watch in self._watches:
                watch.check(now)
            await asyncio.sleep(CHECK_PERIOD_S)


async def until_stuck(ages: Callable[[], Sequence[float]], watchdog_s: float) -> int:
    """Waits until one of `ages`, the seconds since heartbeats, is STUCK_FACTOR times `watchdog_s`. Returns its index.

    It must be old at two checks: when all processes were stopped, as by `docker pause`, the first check may precede the
    heartbeats.
    """
    late: set[int] = set()
    while True:
        await asyncio.sleep(watchdog_s)
        limit = (STUCK_FACTOR - 1) * watchdog_s
        before, late = late, {index for index, age in enumerate(ages()) if age > limit}
        if stuck := before & late:
            return min(stuck)


def _fields(path: Path) -> list[str]:
    """Returns the fields of a stat file from the state on. The name before it may contain blanks."""
    return path.read_text().rpartition(") ")[2].split()


def _cpu_s(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND
