"""The input of templates, and templates that fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.text.chat_template import Conversation
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


@pytest.mark.parametrize("template", ["{{ 1 + messages }}", "{{ messages[5].role }}", "{{ x.y }}"])
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
