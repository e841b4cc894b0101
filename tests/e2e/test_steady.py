"""Mixed requests, some of them left, wear nothing out: `bench/serving/steady.py`, for less long."""

from __future__ import annotations

import random
from collections import Counter

import steady
from support import processes

REQUESTS = 300


def test_nothing_is_lost_in_mixed_requests() -> None:
    seed = random.randrange(1 << 32)
    print(f"{seed=}")
    with processes.server(dp_size=2, **steady.FLAGS) as server:
        result = steady.measure(server, REQUESTS, warm_up=60, seed=seed)
    print(result)
    assert result.grown == []
    assert result.failed == 0
    assert result.ends.total() == REQUESTS
    # All of it has been tried: a seed that misses a third of its share would be one in millions.
    assert result.ends["answered"] > REQUESTS * 0.5
    assert result.ends["hung up"] + result.ends["stream left"] > REQUESTS * 0.15
    assert len(result.kinds) == 8, result.kinds
    assert any(value > 0 for value in result.before.values())


def test_what_has_grown_is_named() -> None:
    before, after = {"files of 1": 7, "pages": 0}, {"files of 1": 8, "pages": 0, "files of 2": 1}
    result = steady.Result(before, after, Counter({"failed: x": 2, "answered": 1}), Counter())
    assert result.grown == ["files of 1", "files of 2"]
    assert result.failed == 2
