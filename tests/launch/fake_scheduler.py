"""The child of a fake worker, whose process id it is given: does nothing, and dies with it."""

from __future__ import annotations

import signal
import sys

from mla_router.worker.child import die_with_parent

die_with_parent(int(sys.argv[1]))
signal.pause()
