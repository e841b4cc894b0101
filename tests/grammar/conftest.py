"""A pool of grammars for the tiny models' tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_router.worker.grammar.pool import GrammarPool, start
from mla_router.worker.messages import Grammar
from support.grammar_driver import Refused, open_request
from support.processes import wait_until
from support.tiny_model import VOCAB_SIZE, tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def grammars(tokenizer_folder: Path) -> Iterator[GrammarPool]:
    """One pool for all tests: on a busy machine the vocabulary may load for longer than a request waits."""
    pool = start(tokenizer_folder, vocab_size=VOCAB_SIZE, max_rows=8)

    def has_loaded() -> bool:
        with contextlib.suppress(Refused):
            pool.close(open_request(pool, Grammar("regex", "a")))
            return True
        return False

    wait_until(has_loaded, "the vocabulary is loaded")
    yield pool
    pool.shut_down()
