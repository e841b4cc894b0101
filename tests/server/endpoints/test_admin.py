"""Profiles and records of the load of experts, with a fake scheduler and with a real one."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mla_router.worker.config import SMALL_MODEL, WorkerConfig
from mla_router.worker.engine.expert_location import choose_placement
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.parallel.balance import balanced
from support import processes
from support.fake_worker import FakeWorker
from support.processes import post_json, wait_until


def refusal(
    worker: FakeWorker | processes.Running, path: str, body: dict[str, Any], status: int = 400
) -> dict[str, Any]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post_json(worker.url + path, body)
    assert caught.value.code == status
    error: dict[str, Any] = json.load(caught.value)["error"]
    return error


def test_refusals_of_the_scheduler(worker: FakeWorker) -> None:
    for path in ("/start_profile", "/stop_profile"):
        assert refusal(worker, path, {})["message"] == "No profile: this scheduler is a fake"
    assert worker.received("StartProfile")[-1][1] == 100
    for action in ("start", "stop", "dump"):
        error = refusal(worker, f"/{action}_expert_distribution_record", {})
        assert error["message"] == "No record: this scheduler is a fake"
        assert worker.received("RecordExperts")[-1][1] == action


@pytest.mark.parametrize("steps", [0, -1, 1001, 10**30, "5", 1.5])
def test_the_number_of_steps_is_bounded(worker: FakeWorker, steps: Any) -> None:
    assert refusal(worker, "/start_profile", {"num_steps": steps})["param"] == "num_steps"


def test_clients_name_no_paths(worker: FakeWorker) -> None:
    error = refusal(worker, "/start_profile", {"output_dir": "/tmp"})
    assert error["param"] == "output_dir"


def test_files_of_a_real_worker(tmp_path: Path) -> None:
    """A trace, and the load of the experts: 4 of each token in 4 layers; the last one computes only the last prompt token.
    Afterwards no file can be written, as on a full disk, and then again."""
    traces, records = tmp_path / "traces", tmp_path / "records"
    with processes.worker(
        profile_dir=traces,
        enable_expert_distribution_metrics=True,
        expert_distribution_recorder_dir=records,
    ) as worker:
        post_json(worker.url + "/start_expert_distribution_record", {})
        assert post_json(worker.url + "/start_profile", {"num_steps": 1000})["success"] is True
        body = {"text": "Hello", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        prompt_tokens = post_json(worker.url + "/generate", body)["meta_info"]["prompt_tokens"]
        post_json(worker.url + "/stop_expert_distribution_record", {})
        answer = post_json(worker.url + "/stop_profile", {})
        assert [str(file) for file in traces.iterdir()] == [answer["file"]]
        assert post_json(worker.url + "/generate", body)["meta_info"]["completion_tokens"] == 3
        written = post_json(worker.url + "/dump_expert_distribution_record", {})["file"]
        assert [str(file) for file in records.iterdir()] == [written]
        counts = json.loads(Path(written).read_text())["logical_count"]
        config = WorkerConfig(tp_size=2, ep_size=2, init_expert_location=written)
        assert choose_placement(config, read_config(SMALL_MODEL)) == balanced(counts, 2)
        rows = prompt_tokens + 2
        assert [len(layer) for layer in counts] == [16] * 5
        assert [sum(layer) for layer in counts] == [0, *[4 * rows] * 3, 4 * 3]
        wait_until(
            lambda: 'sglang:eplb_balancedness{model_name="mla-small"} 1.0' in metrics(worker.url),
            "the load is in the metrics",
        )

        record = "_expert_distribution_record"
        for folder, start, write in (
            (traces, "/start_profile", "/stop_profile"),
            (records, f"/start{record}", f"/dump{record}"),
        ):
            shutil.rmtree(folder)
            folder.touch()
            post_json(worker.url + start, {})
            error = refusal(worker, write, {}, status=500)
            assert error["type"] == "internal_server_error"
            assert "File exists" in error["message"]
            folder.unlink()
        post_json(worker.url + "/start_profile", {})
        assert post_json(worker.url + "/stop_profile", {})["file"].startswith(str(traces))
        assert post_json(worker.url + f"/dump{record}", {})["file"].startswith(str(records))


def metrics(url: str) -> str:
    with urllib.request.urlopen(url + "/metrics") as answer:
        text: str = answer.read().decode()
    return text
