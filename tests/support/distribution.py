"""The order of the tests for several processes of pytest-xdist.

`--dist worksteal` gives each process an equal part of the list. A process without work takes the end of another one's part,
so the beginning of a part stays with its process. There are the tests that share a server, the compiler or the wheel, which
else each process would start or build, and those that start servers of their own, which take longest. The short tests fill
the time at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

# Session fixtures of `servers.py`, each with the group of tests that share it
SHARED = {"small_server": "small", "other_worker": "small", "mortal_server": "mortal"}
COMPILER = "compile_sm90"  # called by the tests that share the compiler process
COMPILING = "test_warmup_"  # begins the names of files whose tests start compilers of their own
# The files whose servers take longest to start: they come first, so that no other process takes some of their tests and starts
# the servers again
FIRST = {"e2e/test_images.py"}
# Folders of `tests/` whose tests start servers of their own, or share a wheel
LONG = {"accuracy", "bench", "e2e", "launch", "nodes", "packaging", "ranks"}


def spread(items: Sequence[pytest.Item], parts: int) -> list[pytest.Item]:
    """Returns the order of `items` for `parts` processes. The tests of a file that begins a part stay together."""
    shared = {item.path: group for item in items if (group := _shared(item)) is not None}
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    short: list[pytest.Item] = []
    for item in items:
        group = "compiler" if _compiles(item) else shared.get(item.path)
        if group is None and LONG.intersection(item.nodeid.split("/")):
            group = str(item.path)
        (short if group is None else groups[group]).append(item)
    beginnings: list[list[pytest.Item]] = [[] for _ in range(parts)]
    for number, name in enumerate(("small", "mortal", "compiler")):
        beginnings[min(number, parts - 1)] += groups.pop(name, [])
    # The first part has the largest group and gets no other. The last part has no group yet.
    in_order = sorted(groups.values(), key=lambda tests: not _is_first(tests[0]))
    for number, tests in enumerate(in_order):
        beginnings[-1 - number % max(1, parts - 1)] += tests
    return _joined(beginnings, short)


def _joined(beginnings: list[list[pytest.Item]], short: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the parts, filled up with short tests to the lengths that xdist gives them."""
    left = sum(map(len, beginnings)) + len(short)
    joined: list[pytest.Item] = []
    for number, beginning in enumerate(beginnings):
        length = left // (len(beginnings) - number)
        fill = max(0, length - len(beginning))
        joined += [*beginning, *short[:fill]]
        short = short[fill:]
        left -= length
    return joined


def _shared(item: pytest.Item) -> str | None:
    fixtures = getattr(item, "fixturenames", ())
    return next((group for name, group in SHARED.items() if name in fixtures), None)


def _is_first(item: pytest.Item) -> bool:
    return "/".join(item.path.parts[-2:]) in FIRST


def _compiles(item: pytest.Item) -> bool:
    code = getattr(getattr(item, "function", None), "__code__", None)
    calls = code is not None and COMPILER in code.co_names
    return calls or item.path.name.startswith(COMPILING)
