"""Shared fixtures of the tests of /v1/responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

from support.fake_worker import FakeWorker

Asking = Callable[..., dict[str, Any]]


@pytest.fixture(scope="package")
def asking(deepseek_worker: FakeWorker, backend: tokenizers.Tokenizer) -> Asking:
    """The arguments of a request to which the model answers so."""

    def ask(answer: str, burst: int = 1, extra: Any = None, **fields: Any) -> dict[str, Any]:
        ids = backend.encode(answer, add_special_tokens=False).ids
        salt = deepseek_worker.say([*ids, 1], burst=burst, cached=2)  # 1: the EOS token
        values = {"model": "deepseek", "input": "Hello!"} | fields
        return values | {"extra_body": {"cache_salt": salt} | (extra or {})}

    return ask
