"""Prompts compared with transformers' renderer; the input of templates, and templates that fail."""

from __future__ import annotations

import inspect
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import transformers

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.text.chat_template import RESERVED, Conversation
from mla_router.worker.server.text.tokenizer import Tokenizer
from support.answers import template

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
QUESTION = Conversation([{"role": "user", "content": "x"}])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(SMALL_MODEL / name, tmp_path)
    return tmp_path


def test_a_templates_own_error_is_the_clients(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        Tokenizer(folder).template.render(QUESTION)


def test_gemmas_template_refuses_a_system_message(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template("gemma2"))
    loaded = Tokenizer(folder).template
    text = loaded.render(QUESTION)
    assert text.endswith("<start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n")
    with pytest.raises(InvalidRequest, match="System role not supported") as caught:
        loaded.render(Conversation([{"role": "system", "content": "y"}, *QUESTION.messages]))
    assert (caught.value.status, caught.value.body.error.param) == (400, "messages")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 + messages }}",
        "{{ messages[5].role }}",
        "{{ x.y }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_a_template_that_fails_is_a_clear_error(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidRequest) as caught:
        Tokenizer(folder).template.render(QUESTION)
    assert caught.value.body.error.param == "messages"


def test_templates_run_in_a_sandbox(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest):
        Tokenizer(folder).template.render(QUESTION)


def test_without_a_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        Tokenizer(folder).template.render(QUESTION)


@pytest.mark.parametrize(
    ("name", "objects"), [("deepseek_v3", False), ("deepseek_v31", False), ("llama3", True)]
)
def test_how_a_template_wants_arguments_is_found_out(
    folder: Path, name: str, objects: bool
) -> None:
    (folder / "chat_template.jinja").write_text(template(name))
    assert Tokenizer(folder).template.wants_objects is objects


def test_templates_by_name(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0] }}")
    (folder / "chat_template.jinja").write_text("no tools")
    rendered = Tokenizer(folder).template.render
    assert rendered(QUESTION) == "no tools"
    assert rendered(Conversation(QUESTION.messages, tools=[{"a": 1}])) == "{'a': 1}"


def test_a_file_takes_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert Tokenizer(SMALL_MODEL, chat_template=file).template.render(QUESTION).startswith("<user>")


def test_the_end_of_an_answer_is_the_models_where_the_tokenizer_is_another_ones(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1024, "eos_token_id": [5, 6]}')
    assert {5, 6} <= Tokenizer(SMALL_MODEL, model_folder=tmp_path).eos_ids


CALL = {"name": "weather", "arguments": '{"city": "Zürich"}'}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is <b>2 > 1</b>?"},
    {"role": "assistant", "content": " Yes. "},
    {"role": "user", "content": "And in Zürich?"},
]
CALLS = [
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "9 °C"},
]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "<b>", "parameters": {}}}
]
PARTS = [{"role": "assistant", "content": [{"type": "text", "text": "two "}, {"type": "image"}]}]
OF_PARTS = "{% for p in messages[0].content %}{{ p.text or '*' }}{% endfor %}!"
# Jinja's extensions and functions that transformers adds
EXTENDED = """{% for message in messages %}
  {% if loop.index > 2 %}{% break %}{% endif %}
  {% generation %}{% set inner = 1 %}{{ message.content }}{% endgeneration %}
{{ [message] | tojson(indent=2) }}{{ inner }}{{ bos_token }}{{ documents }}
{% endfor %}{{ strftime_now('%Y')[:2] }}{{ thinking }}{{ add_generation_prompt }}"""


@pytest.mark.parametrize(
    ("name", "conversation"),
    [
        ("", Conversation(TURNS)),
        ("", Conversation([*TURNS, *CALLS], tools=TOOLS)),
        ("deepseek_v3", Conversation([*TURNS, *CALLS], tools=TOOLS)),
        ("deepseek_v31", Conversation([*TURNS, *CALLS], variables={"thinking": True})),
        ("deepseek_v31", Conversation(TURNS, tools=TOOLS, add_generation_prompt=False)),
        ("llama3", Conversation(TURNS, tools=TOOLS, variables={"date_string": "1 May"})),
        ("gemma2", Conversation(TURNS[1:])),
        (EXTENDED, Conversation(TURNS, variables={"thinking": "deep", "bos_token": "<s>"})),
    ],
    ids=str,
)
@pytest.mark.parametrize("open_end", [False, True], ids=["whole", "open"])
def test_prompts_are_those_of_transformers(
    folder: Path, name: str, conversation: Conversation, open_end: bool
) -> None:
    if name:
        text = name if name is EXTENDED else template(name)
        (folder / "chat_template.jinja").write_text(text)
    if open_end:
        messages = conversation.messages[:3]
        conversation = replace(
            conversation,
            messages=messages,
            add_generation_prompt=False,
            continue_final_message=True,
        )
    check_as_transformers(folder, conversation)


def test_the_last_part_of_a_message_is_continued(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(OF_PARTS)
    check_as_transformers(folder, Conversation(PARTS, None, False, True))
    assert PARTS[0]["content"][0] == {"type": "text", "text": "two "}


def check_as_transformers(folder: Path, asked: Conversation) -> None:
    """Both render the same text, or both refuse."""
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    expected: Any
    try:
        expected = reference.apply_chat_template(
            asked.messages,
            tools=asked.tools,
            tokenize=False,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            **asked.variables,
        )
    except (ValueError, TypeError, jinja2.TemplateError):
        expected = InvalidRequest
    try:
        found: Any = Tokenizer(folder).template.render(asked)
    except InvalidRequest:
        found = InvalidRequest
    assert found == expected


def test_variables_of_the_renderer_are_reserved() -> None:
    render = transformers.PreTrainedTokenizerFast.apply_chat_template
    names = set(inspect.signature(render).parameters) | {"self", "messages", "conversations"}
    assert names == RESERVED
