"""The child of a fake worker. It does nothing and ends with its parent, whose process id is its argument."""

from __future__ import annotations

import signal
import sys

from mla_router.worker.child import die_with_parent

die_with_parent(int(sys.argv[1]))
signal.pause()
