"""Shared workers with a fake scheduler."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import tokenizers

from mla_router.worker.config import SMALL_MODEL
from support.answers import template
from support.fake_worker import FakeWorker, fake_worker

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


@pytest.fixture(scope="package")
def worker() -> Iterator[FakeWorker]:
    """A shared worker. Tests only send requests to it, and leave it healthy."""
    with fake_worker() as running:
        yield running


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    """The small model's tokenizer, loaded by the tokenizers library."""
    return tokenizers.Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))


@pytest.fixture(scope="package")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a folder with the small model's tokenizer and another chat template."""

    def make(chat_template: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        for name in FILES:
            shutil.copy(SMALL_MODEL / name, folder)
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="package")
def deepseek_folder(model_folder: Callable[[str], Path]) -> Path:
    """Starts a worker with the chat template of DeepSeek-V3.1."""
    return model_folder(template("deepseek_v31"))


@pytest.fixture(scope="package")
def deepseek_worker(deepseek_folder: Path) -> Iterator[FakeWorker]:
    with fake_worker(model_path=str(deepseek_folder), served_model_name="deepseek") as running:
        yield running


@pytest.fixture(scope="package")
def deepseek(deepseek_worker: FakeWorker) -> Iterator[openai.OpenAI]:
    # Strict: an answer of other types than OpenAI's raises.
    with openai.OpenAI(
        base_url=deepseek_worker.url + "/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client
