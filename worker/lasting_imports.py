"""Imports without garbage collection, which would take a seventh of the time that torch and all kernels need."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Nothing that is imported here becomes garbage: not now, and not for later collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
