"""The child of a fake worker: does nothing, and dies with its parent."""

from __future__ import annotations

import signal

from mla_router.worker.child import die_with_parent

die_with_parent()
signal.pause()
