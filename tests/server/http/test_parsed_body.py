"""Unknown fields at the endpoints: a misspelt one gets a 400, and another one a line of the log."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from typing import Any

import pytest

from mla_router.worker.server.http.parsed_body import MAX_LOGGED, IgnoredFields
from support.fake_worker import FakeWorker, fake_worker
from support.processes import EVENT_TIMEOUT_S, post_json

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "temprature": 0}, "temperature"),
        ("/v1/completions", {"prompt": "a", "max_token": 1}, "max_tokens"),
        ("/v1/responses", {"input": "a", "instruction": "b"}, "instructions"),
        ("/v1/messages", {"messages": MESSAGES, "maxTokens": 1}, "max_tokens"),
        ("/v1/messages/count_tokens", {"messages": MESSAGES, "sytem": "a"}, "system"),
        ("/generate", {"text": "a", "top_logprob_num": 1}, "top_logprobs_num"),
        ("/tokenize", {"promt": "a"}, "prompt"),
        ("/v1/detokenize", {"token": [1]}, "tokens"),
        ("/abort_request", {"abortAll": True}, "abort_all"),
        ("/start_profile", {"num_step": 1}, "num_steps"),
    ],
)
def test_a_misspelt_field_gets_a_400(
    worker: FakeWorker, path: str, body: dict[str, Any], meant: str
) -> None:
    sent = list(body)[-1]
    request = urllib.request.Request(
        worker.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=EVENT_TIMEOUT_S)
    with caught.value as answer:
        assert answer.code == 400
        assert json.load(answer)["error"] == {
            "message": f"unknown field `{sent}`; did you mean `{meant}`?",
            "type": "invalid_request_error",
            "param": sent,
            "code": "unknown_parameter",
        }


def test_a_foreign_field_is_ignored_and_logged_once() -> None:
    body = {"prompt": "a", "foreign\n field": {"order": ["x"]}}
    # Not the shared worker: other tests may have sent as many names as it logs.
    with fake_worker() as worker:
        for path in ("/tokenize", "/tokenize", "/v1/completions"):
            post_json(worker.url + path, body)
        output = worker.running.output()
    assert output.count(r"unknown field 'foreign\n field' of /tokenize is ignored") == 1
    assert output.count("foreign") == 1


def test_the_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ignored = IgnoredFields()
    ignored.add([f"{index:03}" + "é" * 1000 for index in range(2 * MAX_LOGGED)], "/tokenize")
    assert len(caplog.messages) == MAX_LOGGED
    assert max(map(len, caplog.messages)) < 500
