"""/start_profile and /stop_profile with a fake scheduler."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from support import processes
from support.fake_worker import FakeWorker
from support.processes import post_json


def refusal(worker: FakeWorker, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post_json(worker.url + path, body)
    assert caught.value.code == 400
    error: dict[str, Any] = json.load(caught.value)["error"]
    return error


def test_refusals_of_the_scheduler(worker: FakeWorker) -> None:
    for path in ("/start_profile", "/stop_profile"):
        assert refusal(worker, path, {})["message"] == "No profile: this scheduler is a fake"
    assert worker.heard("StartProfile")[-1][1] == 100


@pytest.mark.parametrize("steps", [0, -1, 1001, 10**30, "5", 1.5])
def test_the_number_of_steps_is_bounded(worker: FakeWorker, steps: Any) -> None:
    assert refusal(worker, "/start_profile", {"num_steps": steps})["param"] == "num_steps"


def test_clients_name_no_paths(worker: FakeWorker) -> None:
    error = refusal(worker, "/start_profile", {"output_dir": "/tmp"})
    assert error["param"] == "output_dir"


def test_a_trace_of_a_real_worker(tmp_path: Path) -> None:
    with processes.worker(profile_dir=tmp_path) as worker:
        assert post_json(worker.url + "/start_profile", {"num_steps": 1000})["success"] is True
        body = {"text": "Hello", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        post_json(worker.url + "/generate", body)
        answer = post_json(worker.url + "/stop_profile", {})
        assert [str(file) for file in tmp_path.iterdir()] == [answer["file"]]
        assert post_json(worker.url + "/generate", body)["meta_info"]["completion_tokens"] == 3
