"""A frozen scheduler is detected by its heartbeat, and a busy machine is not mistaken for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from mla_router.worker import heartbeat_watch
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.heartbeat_watch import Activity, HeartbeatWatch, activity
from support import processes
from support.processes import wait_until

RUNS = Activity(is_stopped=False, wants_to_run=True, cpu_s=1.0, main_cpu_s=1.0)
SLEEPS = Activity(is_stopped=False, wants_to_run=False, cpu_s=1.0, main_cpu_s=1.0)
STOPPED = Activity(is_stopped=True, wants_to_run=False, cpu_s=1.0, main_cpu_s=1.0)


class Watched:
    """A watch with a fake clock and a fake activity of the scheduler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heartbeat = Heartbeat.create()
        self.heartbeat.start()
        self.doing = RUNS
        monkeypatch.setattr(heartbeat_watch, "activity", lambda _: self.doing)
        monkeypatch.setattr(heartbeat_watch.time, "monotonic", lambda: 0.0)
        self.watch = HeartbeatWatch(self.heartbeat)
        self.now = 0.0

    def look(self, seconds: float, doing: Activity, every: float = 0.2) -> bool:
        """Returns whether the scheduler counts as frozen after `seconds`."""
        self.doing = doing
        for _ in range(round(seconds / every)):
            self.now += every
            self.watch.check(self.now)
        return self.watch.is_frozen


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_sleeping_scheduler_without_heartbeat_is_frozen_in_a_second(watched: Watched) -> None:
    assert not watched.look(1.0, SLEEPS)
    assert watched.look(0.4, SLEEPS)


def test_a_stopped_scheduler_is_frozen_at_once(watched: Watched) -> None:
    assert watched.look(0.6, STOPPED)


def test_it_is_not_any_more_as_soon_as_it_beats(watched: Watched) -> None:
    assert watched.look(5.0, SLEEPS)
    watched.heartbeat.update()
    assert not watched.watch.is_frozen
    assert not watched.look(0.6, SLEEPS)


def test_a_scheduler_that_waits_for_a_core_is_not_frozen(watched: Watched) -> None:
    assert not watched.look(20.0, RUNS)


def computed(seconds: float) -> Activity:
    """Returns the activity after `seconds` of CPU time since `RUNS`."""
    return replace(RUNS, cpu_s=RUNS.cpu_s + seconds, main_cpu_s=RUNS.main_cpu_s + seconds)


def test_a_step_that_never_ends_is_found_by_its_cpu_time(watched: Watched) -> None:
    assert not watched.look(0.4, RUNS)
    assert not watched.look(0.2, computed(1.5))
    assert watched.look(0.2, computed(2.0))


def test_a_step_that_should_take_long_has_four_times_as_long(watched: Watched) -> None:
    watched.heartbeat.expect(3.0)
    assert not watched.look(0.4, RUNS)
    assert not watched.look(0.2, computed(11.5))
    assert watched.look(0.2, computed(12.5))


def test_the_cpu_time_of_other_threads_does_not_count(watched: Watched) -> None:
    assert not watched.look(0.4, RUNS)
    assert not watched.look(0.2, replace(RUNS, cpu_s=60.0))


SPINS = """
import sys
from mla_router.worker.heartbeat import Heartbeat
Heartbeat(int(sys.argv[1])).start()
while True:
    pass
"""


def test_a_real_process_that_spins_is_found() -> None:
    """A thread that polls a GPU for the end of a step."""
    heartbeat = Heartbeat.create()
    environment = os.environ | {"PYTHONPATH": str(processes.ROOT / "python")}
    command = [sys.executable, "-c", SPINS, str(heartbeat.descriptor)]
    child = subprocess.Popen(command, pass_fds=[heartbeat.descriptor], env=environment)
    try:
        wait_until(lambda: heartbeat.pid, "it spins")
        watch = HeartbeatWatch(heartbeat)

        def is_found() -> bool:
            watch.check(time.monotonic())
            return watch.is_frozen

        wait_until(is_found, "it is found")
        spun = activity(child.pid)
        assert spun is not None
        # CPU time: a busy machine gives it only a share of a core.
        assert heartbeat_watch.HUNG_CPU_S <= spun.main_cpu_s < 2.5
    finally:
        child.kill()
        child.wait()


def test_a_paused_scheduler_is_frozen_only_if_it_is_stopped(watched: Watched) -> None:
    with watched.heartbeat.paused():
        assert not watched.look(20.0, SLEEPS)
        assert watched.look(0.6, STOPPED)


def test_a_watch_that_was_held_up_itself_draws_no_conclusion(watched: Watched) -> None:
    """The watch itself was stopped for a minute and then sees no heartbeat."""
    watched.look(0.2, SLEEPS)
    assert not watched.look(60.0, SLEEPS, every=60.0)


def test_activity_of_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        wait_until(lambda: not activity(child.pid).wants_to_run, "it sleeps")  # type: ignore[union-attr]
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: activity(child.pid).is_stopped, "it is stopped")  # type: ignore[union-attr]
    finally:
        child.kill()
        child.wait()
    assert activity(child.pid) is None
