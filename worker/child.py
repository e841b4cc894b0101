"""A child process that never outlives its parent, and leaves the signals to stop to it.

The kernel sends the signal (PR_SET_PDEATHSIG), so the child also ends when the parent is killed with SIGKILL. The child
requests the signal as its first action: a preexec_fn in the parent would run Python between fork and exec, which is
unsafe once the parent has threads. The signal is tied to the thread that started the child, so children must be started
from the main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# Ctrl-C, systemd's SIGTERM and the SIGHUP of a closed terminal reach all processes of a group.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_stop_signals() -> None:
    """Ignores the signals that stop a worker: its first API process decides when this one ends. Children inherit it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Lets the kernel kill this process when its parent ends.

    There is no signal if the parent ended before the request. So the parent is checked afterwards: it must be
    `parent_pid`, or by default the same process as before the request.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)
