"""Ends a child process with its parent.

The kernel sends the signal (PR_SET_PDEATHSIG), even if the parent was killed with SIGKILL. The child requests it at its
start: a preexec_fn in the parent would run Python between fork and exec, which is unsafe with threads. The signal depends
on the *thread* that started the child: start children from the main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent_pid: int | None = None) -> None:
    """Makes the kernel kill this process when its parent ends. Raises OSError.

    If the parent has ended before the request, the kernel sends no signal. So the function checks the parent afterwards: it
    must be `parent_pid`, or by default the same as before the request.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)
