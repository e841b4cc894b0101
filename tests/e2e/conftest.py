"""The output of servers is shown beside failures."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from support.processes import Running


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
