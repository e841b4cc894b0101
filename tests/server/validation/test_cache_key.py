"""The fields that separate prefix caches reach the scheduler."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mla_router.worker.server.validation.prompts import cache_key
from support.fake_worker import FakeWorker
from support.processes import post_json

BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}


@pytest.mark.parametrize("path", BODIES)
def test_each_pair_has_a_cache_of_its_own(worker: FakeWorker, path: str) -> None:
    for salt, extra in itertools.product([None, "a", "ab"], [None, "b", "bc"]):
        post_json(worker.url + path, BODIES[path] | {"cache_salt": salt, "extra_key": extra})
    asked = worker.generates()[-9:]
    assert len({generate.cache_salt for generate in asked}) == 9
    assert asked[0].cache_salt == ""


def test_a_key_does_not_depend_on_where_the_salt_ends() -> None:
    assert cache_key("ab", "c") != cache_key("a", "bc")
    assert cache_key("a", "") == cache_key("a", None) == "a"
