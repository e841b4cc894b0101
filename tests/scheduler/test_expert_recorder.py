"""Records of the load of experts."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from mla_router.worker.messages import Recorded, RecordExperts
from mla_router.worker.scheduler.expert_recorder import ExpertRecorder


class Counting:
    """Counts that a step has changed at each look."""

    def __init__(self) -> None:
        self.looks = 0

    def read(self) -> list[list[int]]:
        self.looks += 1
        return [[0, 0], [self.looks, 10 * self.looks**2]]

    def balancedness(self) -> float:
        return 0.75


def answers(recorder: ExpertRecorder, *actions: Any) -> list[Recorded]:
    return [recorder.answer(RecordExperts(7, action)) for action in actions]


def test_a_record_is_of_the_steps_between_its_ends(tmp_path: Path) -> None:
    recorder = ExpertRecorder(Counting(), tmp_path / "new", "worker-1")
    *quiet, written, again = answers(recorder, "start", "start", "stop", "stop", "dump", "dump")
    assert quiet == [Recorded(7)] * 4
    for answer in (written, again):
        assert Path(answer.file).name.startswith("expert_distribution_recorder_worker-1_")
        counts = json.loads(Path(answer.file).read_text())
        assert counts == {"logical_count": [[0, 0], [1, 10 * (9 - 4)]]}
    assert written.file != again.file
    assert recorder.balancedness() == 0.75


def test_a_running_record_can_be_written(tmp_path: Path) -> None:
    recorder = ExpertRecorder(Counting(), tmp_path, "worker-1")
    _, *dumps = answers(recorder, "start", "dump", "dump")
    found = [json.loads(Path(dump.file).read_text())["logical_count"] for dump in dumps]
    assert found == [[[0, 0], [1, 30]], [[0, 0], [2, 80]]]


@pytest.mark.parametrize("action", ["start", "stop", "dump"])
def test_nothing_is_counted(tmp_path: Path, action: str) -> None:
    recorder = ExpertRecorder(None, tmp_path, "worker-1")
    [answer] = answers(recorder, action)
    assert "--enable-expert-distribution-metrics" in answer.problem
    assert recorder.balancedness() == 0.0


def test_refusals(tmp_path: Path) -> None:
    stopped, dumped = answers(ExpertRecorder(Counting(), tmp_path, "worker-1"), "stop", "dump")
    assert stopped == dumped
    assert not dumped.failed
    assert "call /start_expert_distribution_record" in stopped.problem
    *_, dumped = answers(ExpertRecorder(Counting(), None, "worker-1"), "start", "dump")
    assert "--expert-distribution-recorder-dir" in dumped.problem
    (tmp_path / "file").touch()
    *_, dumped = answers(ExpertRecorder(Counting(), tmp_path / "file", "x"), "start", "dump")
    assert "File exists" in dumped.problem
    assert dumped.failed


def test_a_record_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """As on a full disk."""
    recorder = ExpertRecorder(Counting(), tmp_path, "worker-1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        *_, dumped = answers(recorder, "start", "dump")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in dumped.problem
    assert dumped.failed
    assert list(tmp_path.iterdir()) == []
