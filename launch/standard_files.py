"""Standard input, output and error of a command that was started without them, as by `COMMAND <&- >&- 2>&-`."""

from __future__ import annotations

import os
import sys

STDOUT, STDERR = 1, 2


def open_standard_files() -> None:
    """Opens /dev/null in place of closed ones. Otherwise the next sockets get their numbers, and log lines are sent to
    clients."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # The interpreter has none if they were closed at its start
    sys.stdout = sys.stdout or os.fdopen(STDOUT, "w")
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w")
