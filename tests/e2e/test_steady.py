"""A short run of `bench/serving/steady.py`: mixed requests, some of them aborted, lose no resources."""

from __future__ import annotations

from collections import Counter

import pytest

import steady
from support import processes

SEED = 1  # draws every kind of request, in about its share


@pytest.mark.parametrize(
    ("requests", "dp_size"), [(50, 1), pytest.param(300, 2, marks=pytest.mark.slow)]
)
def test_nothing_is_lost_in_mixed_requests(requests: int, dp_size: int) -> None:
    with processes.server(dp_size=dp_size, **steady.FLAGS) as server:
        result = steady.measure(server, requests, warm_up=20, seed=SEED)
    print(result)
    assert result.grown == []
    assert result.failed == 0
    assert result.ends.total() == requests
    # All of it has been tried.
    assert result.ends["answered"] > requests * 0.5
    assert result.ends["hung up"] + result.ends["stream left"] > requests * 0.15
    assert len(result.kinds) == 8, result.kinds
    assert any(value > 0 for value in result.before.values())


def test_grown_counts_are_named() -> None:
    before, after = {"files of 1": 7, "pages": 0}, {"files of 1": 8, "pages": 0, "files of 2": 1}
    result = steady.Result(before, after, Counter({"failed: x": 2, "answered": 1}), Counter())
    assert result.grown == ["files of 1", "files of 2"]
    assert result.failed == 2
