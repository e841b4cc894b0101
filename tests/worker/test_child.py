"""Children end with their parents, however those end."""

from __future__ import annotations

import signal
import subprocess
import sys

from support.processes import ROOT, wait_until
from support.procfs import descendants, ignored_signals

CHILD = "from mla_router.worker.child import die_with_parent; die_with_parent({parent}); {rest}"
FOREVER = "print('up', flush=True); import signal; signal.pause()"


def start(code: str) -> subprocess.Popen[bytes]:
    environment = {"PYTHONPATH": str(ROOT / "python")}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)


def test_a_killed_parent_takes_its_child_along() -> None:
    child = CHILD.format(parent="__import__('os').getppid()", rest=FOREVER)
    parent = start(
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    (grandchild,) = descendants(parent.pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: not grandchild.alive, "the child is gone")


def test_the_signals_that_stop_a_worker_are_left_to_its_first_process() -> None:
    code = (
        f"from mla_router.worker.child import ignore_stop_signals; ignore_stop_signals(); {FOREVER}"
    )
    with start(code) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= ignored_signals(child.pid)
        child.kill()


def test_a_parent_that_was_gone_before() -> None:
    """The kernel sends nothing for an end that is past: the child must find out by itself."""
    orphan = start(CHILD.format(parent=1 << 22, rest=FOREVER))  # nobody's parent
    assert orphan.wait() == -signal.SIGKILL
    assert orphan.communicate()[0] == b""


def test_a_living_parent_changes_nothing() -> None:
    child = start(CHILD.format(parent="__import__('os').getppid()", rest="print('fine')"))
    assert child.communicate()[0] == b"fine\n"
    assert child.returncode == 0
