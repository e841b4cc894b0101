"""The tokenizer of a folder, compared with transformers and with the tokenizers library."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.text import tokenizer as tokenizer_module
from mla_router.worker.server.text.chat_template import Conversation
from mla_router.worker.server.text.tokenizer import MAX_INLINE_CHARS, Tokenizer, TokenizerError

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
TOKENIZER = Tokenizer(SMALL_MODEL)
REFERENCE = transformers.AutoTokenizer.from_pretrained(str(SMALL_MODEL))


def encode(text: str) -> list[int]:
    return asyncio.run(TOKENIZER.encode(text, context_length=100_000))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(SMALL_MODEL / name, tmp_path)
    return tmp_path


@given(st.text(max_size=50))
def test_raw_prompts_are_encoded_as_transformers_does(text: str) -> None:
    assert encode(text) == REFERENCE.encode(text)


def test_long_texts_too() -> None:
    text = "a long prompt " * MAX_INLINE_CHARS
    assert encode(text) == REFERENCE.encode(text)


def test_a_long_text_lets_the_event_loop_run() -> None:
    """A health check does not wait for the tokenization of megabytes."""

    async def turns_meanwhile() -> int:
        text = "a long prompt, and so on. " * 20_000
        encoding = asyncio.create_task(TOKENIZER.encode(text, context_length=1_000_000))
        turns = 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert len(await encoding) > 100_000
        return turns

    assert asyncio.run(turns_meanwhile()) >= 10


TURNS = st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=20))


@given(st.lists(TURNS, min_size=1))
def test_chats_are_encoded_as_transformers_does(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    text = TOKENIZER.template.render(Conversation(messages))
    ids = asyncio.run(TOKENIZER.encode_rendered(text, context_length=100_000))
    assert ids == REFERENCE.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def test_text_that_no_context_can_hold_is_refused_unread() -> None:
    with pytest.raises(InvalidRequest, match="longer than the model's context length") as caught:
        asyncio.run(TOKENIZER.encode("a" * 10_000, context_length=10))
    assert caught.value.body.error.code == "context_length_exceeded"


def test_every_tokens_bytes(backend: tokenizers.Tokenizer) -> None:
    """The bytes of all tokens of a byte-level vocabulary are known, and add up to the text."""
    ids = encode("naïve 😀 日本 mixed")
    assert b"".join(bytes(TOKENIZER.bytes_of(token) or []) for token in ids) == (
        backend.decode(ids, skip_special_tokens=False).encode()
    )
    parts = [backend.get_vocab()[piece] for piece in "ðŁĺĢ"]
    assert [TOKENIZER.bytes_of(token) for token in parts] == [(0xF0,), (0x9F,), (0x98,), (0x80,)]
    assert TOKENIZER.text_of(parts[0]) == "\ufffd"


def test_a_tokens_space_is_its_own_where_decoders_leave_the_first_one_out(folder: Path) -> None:
    """As in SentencePiece."""
    vocabulary = {"<unk>": 0, "a": 1, "▁cat": 2, "<0x0A>": 3, "<0xF0>": 4, "▁": 5}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    assert list(map(tokenizer.text_of, range(1, 6))) == ["a", " cat", "\n", "\ufffd", " "]
    assert tokenizer.bytes_of(2) == tuple(b" cat")
    assert (tokenizer.bytes_of(3), tokenizer.bytes_of(4)) == ((10,), (0xF0,))


def test_a_chat_template_that_cannot_be_compiled_is_refused(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}\n{% if %}")
    with pytest.raises(TokenizerError, match=r"--chat-template .*chat\.jinja: line 2: "):
        Tokenizer(SMALL_MODEL, chat_template=template)


@pytest.mark.parametrize("given", [False, True])
def test_a_chat_template_without_an_end_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    template = folder / "chat_template.jinja"
    name = f"--chat-template {template}" if given else f"chat template of {folder}"
    ended = threading.Event()
    monkeypatch.setattr(tokenizer_module, "ChatTemplate", lambda *_: ended.wait())
    monkeypatch.setattr(tokenizer_module, "TEMPLATE_S", 0.01)
    with pytest.raises(TokenizerError, match=f"{name}: still renders .* as --chat-template"):
        Tokenizer(folder, chat_template=template if given else None)
    ended.set()


def test_a_tokenizer_without_tokens(tmp_path: Path) -> None:
    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(TokenizerError, match="no token in tokenizer"):
        Tokenizer(tmp_path)


def test_a_broken_template_of_the_folder_leaves_completions(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}\n{% if %}")
    assert Tokenizer(folder).decode([]) == ""
    assert f"chats are refused: the chat template of {folder}: line 2: " in caplog.text


@pytest.mark.parametrize(
    ("path", "reason"), [("/dev/zero", "not a regular file"), ("/no/file", "No such file")]
)
def test_a_chat_template_is_read_within_limits(path: str, reason: str) -> None:
    with pytest.raises(TokenizerError, match=f"--chat-template {path}: {reason}"):
        Tokenizer(SMALL_MODEL, chat_template=Path(path))


def test_eos_of_all_files_counts(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    assert {5, 6, 7} < Tokenizer(folder).eos_ids
    assert REFERENCE.eos_token_id in Tokenizer(folder).eos_ids
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"generation_config\.json: not JSON"):
        Tokenizer(folder)


def test_a_malformed_post_processor_is_named(folder: Path) -> None:
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    unknown = {"SpecialToken": {"id": "[UNKNOWN]", "type_id": 0}}
    fields["post_processor"]["single"].append(unknown)
    path.write_text(json.dumps(fields))
    with pytest.raises(TokenizerError, match=rf"{path}: it encodes no text .* post_processor"):
        Tokenizer(folder)


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=str(folder)):
        Tokenizer(folder)


def test_a_folder_without_tokenizer_files(tmp_path: Path) -> None:
    """The message is one line, and says which flag helps."""
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json .* --tokenizer-path") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
