"""Traces are limited, written once, and readable for trace viewers."""

from __future__ import annotations

import gzip
import json
import resource
from pathlib import Path

import pytest
import torch

from mla_router.worker.config import WorkerConfig
from mla_router.worker.messages import StartProfile, StopProfile
from mla_router.worker.scheduler import profiler as profiler_module
from mla_router.worker.scheduler.profiler import Profiler
from mla_router.worker.step.engine import Capacity
from support.fake_engine import FakeEngine
from support.scripted_scheduler import generate
from support.stepped_scheduler import SteppedScheduler


def names(file: Path) -> set[str]:
    with gzip.open(file) as stream:
        return {event.get("name", "") for event in json.load(stream)["traceEvents"]}


def test_a_trace_has_the_computed_operations(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "of a run" / "traces", "worker-7")
    assert profiler.answer(StartProfile(1, 10), 0).problem == ""
    torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.tick(1)
    answer = profiler.answer(StopProfile(2), 1)
    assert (answer.query, answer.problem) == (2, "")
    assert Path(answer.file).parent == tmp_path / "of a run" / "traces"
    assert Path(answer.file).name.startswith("worker-7-")
    assert "aten::mm" in names(Path(answer.file))


def test_it_ends_after_its_steps(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, "w")
    profiler.answer(StartProfile(1, 3), 5)
    for step in (5, 6, 7):
        profiler.tick(step)
        assert list(tmp_path.iterdir()) == []
    profiler.tick(8)
    assert len(list(tmp_path.iterdir())) == 1
    profiler.tick(9)
    assert profiler.answer(StopProfile(2), 9).problem == "no profile is being recorded"
    assert len(list(tmp_path.iterdir())) == 1


def test_it_ends_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler_module, "MAX_SECONDS", 0.0)
    profiler = Profiler(tmp_path, "w")
    profiler.answer(StartProfile(1, 1000), 0)
    profiler.tick(0)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """As on a full disk."""
    profiler = Profiler(tmp_path, "w")
    profiler.answer(StartProfile(1, 10), 0)
    torch.ones(8, 8) @ torch.ones(8, 8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        answer = profiler.answer(StopProfile(2), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert answer.problem
    assert answer.failed
    assert list(tmp_path.iterdir()) == []


def test_refusals(tmp_path: Path) -> None:
    assert "--profile-dir" in Profiler(None, "w").answer(StartProfile(1, 3), 0).problem
    profiler = Profiler(tmp_path, "w")
    assert profiler.answer(StartProfile(1, 3), 0).problem == ""
    refused = profiler.answer(StartProfile(2, 3), 0)
    assert "is being recorded" in refused.problem
    assert not refused.failed
    assert profiler.answer(StopProfile(3), 0).file


def test_a_folder_that_cannot_be_written_fails_the_profile_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profiler = Profiler(tmp_path / "file", "w")
    profiler.answer(StartProfile(1, 1), 0)
    assert profiler.answer(StopProfile(2), 0).problem
    profiler.answer(StartProfile(3, 1), 0)
    profiler.tick(1)  # an error without a client to tell is logged
    assert profiler.answer(StopProfile(4), 1).problem == "no profile is being recorded"


@pytest.mark.parametrize("fails_at", ["start", "stop", "export_chrome_trace"])
def test_an_error_of_torch_fails_the_profile_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("another profiler uses the device")

    with monkeypatch.context() as broken:
        broken.setattr(torch.profiler.profile, fails_at, fail)
        profiler = Profiler(tmp_path, "w")
        started = profiler.answer(StartProfile(1, 1), 0)
        ended = profiler.answer(StopProfile(2), 0)
        assert "another profiler" in started.problem + ended.problem
        profiler.answer(StartProfile(3, 1), 0)
        profiler.tick(1)
    assert profiler.answer(StopProfile(4), 1).problem == "no profile is being recorded"


def test_the_scheduler_ends_a_profile_after_its_steps(tmp_path: Path) -> None:
    capacity = Capacity(num_pages=16, page_size=4, num_slots=1, context_length=64)
    config = WorkerConfig(profile_dir=str(tmp_path))
    stepped = SteppedScheduler(FakeEngine(capacity), config, overlap=False)
    stepped.turn(StartProfile(1, 2), generate("r", [1, 2, 3], 9))
    for files in (0, 1):
        assert len(list(tmp_path.iterdir())) == files
        for _ in range(4):
            stepped.turn()
    stepped.stop()
