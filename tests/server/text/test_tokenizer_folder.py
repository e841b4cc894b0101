"""Tokenizer folders that are read without transformers give the same as with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.server.text import tokenizer_folder
from mla_router.worker.server.text.tokenizer_folder import TokenizerFolder, read_folder
from support.processes import ROOT

TRAINED = ROOT / "bench/accuracy/trained"
TEXTS = ["", "Plain words, 12 of them.\n", "naïve 😀 日本", "<｜User｜>x<｜end▁of▁sentence｜>"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(SMALL_MODEL / name, tmp_path)
    return tmp_path


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], TokenizerFolder]:
    """Reads a folder. Fails if transformers is needed for it."""

    def fail(folder: Path) -> TokenizerFolder:
        raise AssertionError(f"{folder} was left to transformers")

    def read(folder: Path) -> TokenizerFolder:
        with monkeypatch.context() as patched:
            patched.setattr(tokenizer_folder, "_read_with_transformers", fail)
            return read_folder(folder)

    return read


def change(folder: Path, **fields: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def added_token(content: str, **properties: bool) -> dict[str, Any]:
    plain = dict.fromkeys(["lstrip", "rstrip", "normalized", "single_word"], False)
    return plain | {"content": content, "special": True} | properties


def check_same(found: TokenizerFolder, expected: TokenizerFolder) -> None:
    assert found[1:] == expected[1:]
    assert found.backend.get_vocab() == expected.backend.get_vocab()
    for text in TEXTS:
        for special in (True, False):
            ids = [
                tokenizer.backend.encode(text, add_special_tokens=special).ids
                for tokenizer in (found, expected)
            ]
            assert ids[0] == ids[1], (text, special)


@pytest.mark.parametrize(
    "folder", [SMALL_MODEL, TRAINED / "gemma2", TRAINED / "llava_onevision"], ids=lambda p: p.name
)
def test_shipped_folders(folder: Path, plain: Callable[[Path], TokenizerFolder]) -> None:
    check_same(plain(folder), tokenizer_folder._read_with_transformers(folder))


BOS = "<｜begin▁of▁sentence｜>"
AS_DEEPSEEK = {
    "tokenizer_class": "LlamaTokenizerFast",
    "add_bos_token": True,
    "legacy": True,
    "sp_model_kwargs": {},
    "unk_token": None,
    "bos_token": {"__type": "AddedToken", **added_token(BOS, normalized=True)},
    "chat_template": "{{ bos_token }}{{ messages[0].content }}",
}
AS_LLAMA_3 = {
    "added_tokens_decoder": {"0": added_token(BOS), "3": added_token("<｜User｜>")},
    "extra_special_tokens": ["<｜Assistant｜>"],
    "chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
}


@pytest.mark.parametrize("own_template", [True, False], ids=["file", "field"])
@pytest.mark.parametrize("fields", [AS_DEEPSEEK, AS_LLAMA_3], ids=["deepseek", "llama 3"])
def test_published_forms(
    folder: Path,
    plain: Callable[[Path], TokenizerFolder],
    fields: dict[str, Any],
    own_template: bool,
) -> None:
    change(folder, **fields)
    if not own_template:
        (folder / "chat_template.jinja").unlink()
    check_same(plain(folder), tokenizer_folder._read_with_transformers(folder))


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer_class": "LlamaTokenizerFast", "model_type": "llama"},
        {"pad_token": "<not in tokenizer.json>"},
        {"eos_token": "<｜tool▁sep｜>"},  # is in tokenizer.json, but not special
        {"extra_special_tokens": ["<also new>"]},
        {"extra_special_tokens": {"image_token": "<｜User｜>"}},
        {"image_token": "<｜User｜>"},
        {"added_tokens_decoder": {"3": added_token("<｜User｜>", lstrip=True)}},
        {"add_prefix_space": True},
        {"split_special_tokens": True},
    ],
    ids=str,
)
def test_other_forms_are_left_to_transformers(folder: Path, fields: dict[str, Any]) -> None:
    if (model := fields.pop("model_type", None)) is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model}))
    change(folder, **fields)
    assert tokenizer_folder._read_plain(folder) is None


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_files_that_change_tokens_are_left_to_transformers(folder: Path, name: str) -> None:
    (folder / name).write_text("{}")
    assert tokenizer_folder._read_plain(folder) is None
