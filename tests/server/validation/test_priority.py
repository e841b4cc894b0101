"""The field `priority`: heard by the scheduler where it is heeded, refused where it would not be."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.fake_worker import FakeWorker, fake_worker
from support.processes import post_json

OPENAI = {"model": "mla-small", "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": OPENAI | {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": OPENAI | {"prompt": "Hi"},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
}


@pytest.fixture(scope="module")
def heeding() -> Iterator[FakeWorker]:
    with fake_worker(enable_priority_scheduling=True) as worker:
        yield worker


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("given", "heard"), [(7, 7), (-100, -100), (None, 0)])
def test_the_scheduler_hears_it(
    heeding: FakeWorker, path: str, given: int | None, heard: int
) -> None:
    post_json(heeding.url + path, BODIES[path] | {"priority": given})
    assert heeding.generates()[-1].priority == heard


@pytest.mark.parametrize("priority", [101, -101, 1 << 70, 1.5, "high"])
def test_a_wrong_one_is_named(heeding: FakeWorker, priority: object) -> None:
    client = openai.OpenAI(base_url=heeding.url + "/v1", api_key="none")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(
            model="mla-small", prompt="Hi", max_tokens=2, extra_body={"priority": priority}
        )
    assert refused.value.param == "priority"


@pytest.mark.parametrize("path", BODIES)
def test_where_it_is_not_heeded_it_is_refused(worker: FakeWorker, path: str) -> None:
    post_json(worker.url + path, BODIES[path] | {"priority": 0})
    with pytest.raises(urllib.error.HTTPError) as refused:
        post_json(worker.url + path, BODIES[path] | {"priority": 1})
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["param"]) == (400, "priority")
    assert "--enable-priority-scheduling" in error["message"]
