"""A child process that never outlives its parent.

The kernel sends the signal (PR_SET_PDEATHSIG), so it also works when the parent was killed with
SIGKILL and could clean up nothing. The child asks for it itself, first thing: a preexec_fn in the
parent would run Python between fork and exec, which is unsafe once the parent has threads.
The signal is tied to the *thread* that started the child: start children from the main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have this process killed when its parent ends.

    A parent that ended before the request reached the kernel sends no signal any more, so the
    parent is looked up afterwards: it must still be `parent_pid`, or, where the caller cannot know
    that, the one that it was before.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)
