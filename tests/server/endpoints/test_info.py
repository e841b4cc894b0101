"""Health, load and settings of a worker."""

from __future__ import annotations

import json
import re

import openai

from support.fake_worker import FakeWorker, fake_worker, script
from support.processes import get_json, post_json, status_of, wait_until

WATCHDOG_S = 2.0  # a quarter of the time without a heartbeat, after which a worker is ended
STATS = {
    "token_s",
    "context_s",
    "running",
    "waiting",
    "total_pages",
    "free_pages",
    "cached_pages",
    "total_slots",
    "free_slots",
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "retracted",
    "compiling",
    "expert_balancedness",
    "draft_steps",
    "draft_tokens",
    "accepted_tokens",
    "step_seconds",
    "wait_seconds",
}


def test_server_info(worker: FakeWorker) -> None:
    info = get_json(worker.url + "/get_server_info")
    assert info["served_model_name"] == "mla-small"
    assert info["worker_id"] == worker.url.removeprefix("http://")
    assert re.fullmatch(r"[0-9a-f]{32}", info["boot_id"])
    assert info["boot_id"] == get_json(worker.url + "/get_server_info")["boot_id"]
    assert info["uptime_s"] > 0
    assert {
        "model_path",
        "version",
        "max_total_num_tokens",
        "page_size",
        "max_running_requests",
        "context_length",
        "device",
        "dtype",
        "kv_cache_dtype",
        "attention_backend",
    } < set(info)
    assert (info["max_total_num_tokens"], info["page_size"]) == (4096, 16)
    assert set(info["scheduler"]) == STATS
    (state,) = info["internal_states"]
    assert state.pop("memory_usage") == {"token_capacity": 4096}
    assert state.pop("avg_spec_accept_length") == 0
    assert state.pop("effective_max_running_requests_per_dp") == 128
    assert set(state) == STATS | {"last_gen_throughput", "load"}
    short = get_json(worker.url + "/server_info")
    assert short.keys() == info.keys()
    assert short["version"] == info["version"]
    assert get_json(worker.url + "/model_info") == get_json(worker.url + "/get_model_info")


def test_settings_are_shown_and_secrets_are_not() -> None:
    with fake_worker(ready_path=None, api_key="s3cret", chunked_prefill_size=77) as worker:
        client = openai.OpenAI(base_url=worker.url, api_key="s3cret", max_retries=0)
        wait_until(lambda: status_of(worker.url + "/health") == 200, "it is ready")
        text = client.get("/get_server_info", cast_to=str)
        info = json.loads(text)
        assert info["chunked_prefill_size"] == 77
        assert "s3cret" not in text
        assert "api_key" not in info


def test_load(worker: FakeWorker) -> None:
    get_json(worker.url + "/get_server_info")  # updates the last statistics
    (load,) = get_json(worker.url + "/get_load")
    assert load == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}


def test_the_served_model(worker: FakeWorker) -> None:
    info = get_json(worker.url + "/get_model_info")
    assert info["is_generation"] is True
    assert info["has_image_understanding"] is False
    assert info["model_path"] == info["tokenizer_path"]
    assert info["served_model_name"] == "mla-small"
    assert status_of(worker.url + "/health_generate") == 200


def test_models(worker: FakeWorker) -> None:
    client = openai.OpenAI(
        base_url=worker.url + "/v1", api_key="none", _strict_response_validation=True
    )
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("mla-small", "model")
    assert client.models.retrieve("mla-small") == model


def test_flush_cache(worker: FakeWorker) -> None:
    before = len(worker.received("FlushCache"))
    answer = post_json(worker.url + "/flush_cache", {})
    assert answer["success"] is True
    assert set(answer["scheduler"]) == STATS
    assert len(worker.received("FlushCache")) == before + 1


def test_a_stuck_scheduler_is_not_healthy() -> None:
    """HTTP works, but the heartbeats have stopped."""
    with fake_worker(watchdog_timeout=WATCHDOG_S) as worker:
        post_json(
            worker.url + "/generate",
            {
                "text": "a",
                "sampling_params": {"max_new_tokens": 1},
                "cache_salt": script(silent=True),
            },
        )
        wait_until(lambda: status_of(worker.url + "/health") == 503, "/health says 503")
        assert worker.running.process.wait(60) == 3, "somebody has to start it anew"
        assert "the scheduler has been stuck for 8 seconds, and is ended" in worker.running.output()
