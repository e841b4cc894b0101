"""Child processes: small Python programs on the command line."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from mla_router.launch import process
from mla_router.launch.process import MAX_LINE, Process, describe_exit
from support.processes import EVENT_TIMEOUT_S, wait_until
from support.procfs import descendants

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


@pytest.fixture(autouse=True)
def a_patient_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long time for the output after a child's end, for a busy machine."""
    monkeypatch.setattr(process, "OUTPUT_END_S", EVENT_TIMEOUT_S)


@pytest.fixture
def init_process() -> Iterator[None]:
    """Makes this process the parent of descendants without a parent, as an init process is."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def run_child(program: str) -> tuple[int, list[str]]:
    """Runs a program. Returns its exit status and its lines."""
    lines: list[str] = []

    async def run() -> int:
        child = await Process.start([sys.executable, "-u", "-c", program], lines.append)
        return await child.wait()

    return asyncio.run(run()), lines


def test_both_outputs_are_shown_line_by_line() -> None:
    status, lines = run_child(
        "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
    )
    assert (status, lines) == (3, ["one", "two"])


def test_a_last_line_without_its_end_is_shown() -> None:
    assert run_child("print('no newline', end='')") == (0, ["no newline"])


def test_of_a_progress_bar_only_the_last_state_is_shown() -> None:
    assert run_child(r"print('10%\r50%\r100%')") == (0, ["100%"])


def test_an_endless_line_is_shown_in_pieces() -> None:
    length = 3 * MAX_LINE
    _, lines = run_child(f"print('x' * {length})")
    assert len(lines) > 1
    assert "".join(lines) == "x" * length


@pytest.mark.usefixtures("init_process")
def test_no_zombies_are_left_in_a_container() -> None:
    """Where the launcher is the init process, it is the parent of all that a child leaves behind."""

    async def run() -> int:
        program = "import subprocess; subprocess.Popen(['sleep', '100'])"
        child = await Process.start([sys.executable, "-c", program], print)
        await child.wait()
        return child.pid

    group = asyncio.run(run())
    with pytest.raises(ChildProcessError):
        os.waitpid(-group, os.WNOHANG)


def test_broken_utf8_is_shown() -> None:
    _, lines = run_child(r"import os; os.write(1, b'\xff\n')")
    assert lines == ["\N{REPLACEMENT CHARACTER}"]


def is_alive(number: int) -> bool:
    return number in {pid.number for pid in descendants(1)}


GRANDCHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid)
"""


def test_the_end_of_a_child_is_the_end_of_its_group() -> None:
    """A grandchild keeps the output open: `wait` does not wait for it."""
    status, (grandchild,) = run_child(GRANDCHILD)
    assert status == 0
    wait_until(lambda: not is_alive(int(grandchild)), "it is killed")


DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf")
signal.pause()
"""


def test_stop_is_sigterm_first_and_sigkill_for_the_deaf() -> None:
    async def stop(program: str, grace_s: float) -> int:
        started = asyncio.Event()
        child = await Process.start([sys.executable, "-u", "-c", program], lambda _: started.set())
        await started.wait()
        return await child.stop(grace_s)

    gentle = "import signal; print('here'); signal.pause()"
    assert asyncio.run(stop(gentle, grace_s=EVENT_TIMEOUT_S)) == -signal.SIGTERM
    assert asyncio.run(stop(DEAF, grace_s=0.1)) == -signal.SIGKILL


def test_exits_are_described() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-signal.SIGKILL) == "was ended by signal 9 (Killed)"
