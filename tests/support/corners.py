"""Cases of a parametrised test for which the whole product takes long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice, product
from typing import Any

import pytest


def corners(first: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """Returns all combinations, most of them marked `slow`.

    Not marked are as many that each value of `first` and each combination of `others` occurs.
    """
    combined = list(product(*others))
    count = max(len(first), len(combined))
    usual = list(islice(zip(cycle(range(len(first))), cycle(range(len(combined)))), count))
    return [
        pytest.param(value, *rest, marks=() if (row, column) in usual else pytest.mark.slow)
        for row, value in enumerate(first)
        for column, rest in enumerate(combined)
    ]
