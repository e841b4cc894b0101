"""Limits of a grammar's process: CPU time and the allowance that it comes from."""

from __future__ import annotations

import signal
import subprocess
import sys

from mla_router.worker.grammar.limits import Allowance
from support.compiler_process import compiling_environment

OVERRUN = """
from mla_router.worker.grammar.limits import Allowance, cpu_limit
allowance = Allowance(burst=0.5)
allowance.spend(60.0)
with cpu_limit(allowance.left):
    while True:
        pass
"""


def test_a_spent_allowance_ends_the_process_at_the_next_overrun() -> None:
    """A CPU limit of 0 would mean no limit, so a spent allowance keeps a small one."""
    command = [sys.executable, "-c", OVERRUN]
    ended = subprocess.run(command, env=compiling_environment(), check=False, timeout=60)
    assert ended.returncode == -signal.SIGPROF


def test_an_allowance_that_is_not_used_does_not_grow_above_the_burst() -> None:
    allowance = Allowance(burst=0.5)
    allowance.spend(0.3)
    allowance.add(0.2)
    assert abs(allowance.left - 0.4) < 1e-9
    allowance.add(10.0)
    assert allowance.left == 0.5
