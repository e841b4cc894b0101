"""Shared servers of the end-to-end tests. Their output is shown beside failures."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from support import processes
from support.processes import Running


@pytest.fixture(scope="session")
def small_server() -> Iterator[Running]:
    """`launch_server --dp-size 2` with the shipped model. Tests only send requests to it."""
    with processes.server(dp_size=2) as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report: pytest.TestReport = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Running):
                report.sections.append((f"output of {name}", value.output()[-20_000:]))
    return report
