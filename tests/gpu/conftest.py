"""A test marked `whole_gpu` takes all memory of a GPU: no other GPU test runs beside it in another process."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

# Their locks are used, not their text
GATE, GPU = Path(__file__), Path(__file__).parents[1] / "conftest.py"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Holds the lock of the GPU, with others unless the test needs all memory. All pass a gate to it, where a test that
    waits to be alone stops the others: otherwise their shares would overlap until the end of the run. The fixtures
    of a test are covered as well: some start servers on the GPU."""
    alone = item.get_closest_marker("whole_gpu") is not None
    with GPU.open() as lock:
        with GATE.open() as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)
