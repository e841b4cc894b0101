"""`python -m mla_router.launch_worker`: one worker alone; the same as `python -m mla_router.worker`."""

from __future__ import annotations

from mla_router.worker.__main__ import main

__all__ = ["main"]
