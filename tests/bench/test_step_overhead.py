"""bench/serving/step_overhead.py: schedulers whose steps are agreed on or repeated by other processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from step_overhead import PHASES, Load, steps


@pytest.mark.parametrize("others", [{}, {"dp_size": 2}, {"ranks": 2}], ids=str)
def test_each_phase_of_a_step_is_timed(tmp_path: Path, others: dict[str, int]) -> None:
    row = steps(tmp_path, Load(2, waiting=1, **others), 5)
    assert all(row[phase] > 0 for phase in PHASES), row
    assert row["step"] <= row["step_p99"]
