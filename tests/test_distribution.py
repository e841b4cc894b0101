"""The order of tests for several processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.distribution import spread


def compiles() -> None:
    compile_sm90()  # type: ignore[name-defined]  # noqa: F821


def fake(path: str, fixture: str = "", function: Any = None) -> Any:
    return SimpleNamespace(
        path=Path(path), nodeid=f"tests/{path}::x", fixturenames=[fixture], function=function
    )


SMALL = [fake("e2e/test_a.py"), fake("e2e/test_a.py", "small_server"), fake("z.py", "other_worker")]
MORTAL = [fake("e2e/test_b.py", "mortal_server")]
COMPILING = [fake("kernels/test_c.py", function=compiles), fake("engine/test_warmup_x.py")]
OWN = [fake(f"launch/test_{number}.py") for number in range(10) for _ in range(2)]
IMAGES = [fake("e2e/test_images.py") for _ in range(7)]
SHORT = [fake("model/test_d.py") for _ in range(60)]


def parts_of_xdist(items: list[Any], count: int) -> list[list[Any]]:
    parts = []
    while items:
        length = len(items) // (count - len(parts))
        parts.append(items[:length])
        items = items[length:]
    return parts


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_tests_with_servers_begin_the_parts(count: int) -> None:
    items = [*SHORT[:20], *OWN, *SMALL, *IMAGES, *SHORT[20:], *COMPILING, *MORTAL]
    ordered = spread(items, count)
    assert sorted(map(id, ordered)) == sorted(map(id, items))
    parts = parts_of_xdist(ordered, count)
    assert parts[0][: len(SMALL)] == SMALL
    for group in (MORTAL, COMPILING):
        assert sum(item in part for part in parts for item in group[:1]) == 1
        (part,) = [part for part in parts if group[0] in part]
        assert [item for item in part if item in group] == group
    for part in parts:
        lengths = [item in SHORT for item in part]
        assert lengths == sorted(lengths), "a short test comes before one with a server"
    if count > 2:
        of_own = [sum(item in OWN for item in part) for part in parts]
        assert of_own[0] == 0 and max(of_own[1:]) - min(of_own[1:]) <= 2, of_own
    if count > 3:
        assert parts[-1][: len(IMAGES)] == IMAGES
