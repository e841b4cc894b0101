"""A pool of grammars for the tiny models' tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_router.worker.grammar.pool import Grammars, start
from support.tiny_model import VOCAB_SIZE, tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def grammars(tokenizer_folder: Path) -> Iterator[Grammars]:
    """Forked once: loading the vocabulary takes seconds."""
    pool = start(tokenizer_folder, vocab_size=VOCAB_SIZE, max_rows=8)
    yield pool
    pool.shut_down()
