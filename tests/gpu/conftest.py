"""A test marked `whole_gpu` takes all memory of a GPU: the processes of pytest-xdist run no other GPU test beside it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Covers the fixtures of a test as well: some start servers on the GPU."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:  # one process
        return (yield)
    alone = item.get_closest_marker("whole_gpu") is not None
    with _share(Path(tempfile.gettempdir()) / f"gpu-tests-{run}", alone=alone):
        return (yield)


@contextmanager
def _share(path: Path, *, alone: bool) -> Iterator[None]:
    """Holds the lock `path`, with others unless `alone`. All pass a gate to it, where a test that waits to be alone keeps
    the others: without it their shares would overlap until the end of the run."""
    with path.open("a") as lock, path.with_suffix(".gate").open("a") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
