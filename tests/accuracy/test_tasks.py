"""The training text of the small model is well-formed, and equals the text that a worker would write."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tasks import TASKS, arithmetic, tools
from tasks.example import BOS
from transformers import AutoTokenizer

from mla_router.worker.config import SMALL_MODEL

DRAWS = 40


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SMALL_MODEL)


def ids(tokenizer: Any, text: str) -> list[int]:
    encoded: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return encoded


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("held_out", [False, True])
def test_tokens_of_the_parts_are_those_of_the_text(
    tokenizer: Any, name: str, held_out: bool
) -> None:
    """A server tokenizes a prompt as a whole, and then the model goes on from its end."""
    draw = random.Random(name)
    for _ in range(DRAWS):
        example = TASKS[name][0](draw, held_out)
        whole = ids(tokenizer, "".join(part.text for part in example))
        assert whole == [token for part in example for token in ids(tokenizer, part.text)]
        assert len(whole) <= 4096
        assert not example[0].is_answer
        assert any(part.is_answer for part in example)
        assert example[0].text.startswith(BOS)


def test_what_is_held_out_is_never_learnt_from() -> None:
    draw = random.Random(1)
    learnt = {arithmetic.pair(draw, 10, 99, False) for _ in range(20_000)}
    asked = {arithmetic.pair(draw, 10, 99, True) for _ in range(2_000)}
    assert not learnt & asked
    # Of each last digit of the sum, and not only of some: the rule must be learnt, not the table.
    assert {(a + b) % 10 for a, b in asked} == set(range(10))


def test_stories_add_up() -> None:
    draw = random.Random(2)
    for _ in range(500):
        _, answer = arithmetic.one_story(draw, held_out=False)
        *steps, last = answer.removesuffix(".").split(". ")
        for step in steps:
            a, sign, b, _, value = step.split()
            x, y = int(a), int(b)
            assert int(value) == {"+": x + y, "-": x - y, "*": x * y}[sign] >= 0
        assert last == f"The answer is {value}"


def test_tools_are_written_as_the_chat_template_writes_them(tokenizer: Any) -> None:
    draw = random.Random(3)
    for tool in tools.TOOLS:
        question, arguments = tool.ask(draw)
        value, said = tool.result(draw, arguments)
        call = {"name": tool.name, "arguments": json.dumps(arguments)}
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": question},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": json.dumps(value)},
            {"role": "assistant", "content": said},
        ]
        rendered = tokenizer.apply_chat_template(
            messages, tools=[other.as_openai for other in tools.TOOLS], tokenize=False
        )
        assert rendered == (
            f"{BOS}Be brief.{tools.listed(list(tools.TOOLS))}<｜User｜>{question}<｜Assistant｜>"
            f"{tools.written(tool, arguments)}<｜end▁of▁sentence｜>"
            f"{tools.OUTPUT_BEGIN}{json.dumps(value)}{tools.OUTPUT_END}"
            f"<｜Assistant｜>{said}<｜end▁of▁sentence｜>"
        )
