"""A worker with a fake scheduler that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tokenizers

from mla_router.worker.config import SMALL_MODEL
from support.fake_worker import FakeWorker, fake_worker


@pytest.fixture(scope="package")
def worker() -> Iterator[FakeWorker]:
    """Tests only send to it, and leave it as healthy as they found it."""
    with fake_worker() as running:
        yield running


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    """The small model's tokenizer, read by the library alone."""
    return tokenizers.Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
