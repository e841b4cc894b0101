"""/tokenize and /detokenize, compared with the tokenizers library."""

from __future__ import annotations

import json
import urllib.error
from typing import Any

import pytest
import tokenizers
import transformers

from mla_router.worker.config import SMALL_MODEL
from support.fake_worker import FakeWorker
from support.processes import get_json, post_json

TEXTS = [
    "Hello, world",
    "",
    "  two  spaces\n",
    "naïve 😀 漢字",
    "<｜end▁of▁sentence｜> is only text here",
    "\x00",
]


def tokenize(worker: FakeWorker, **body: Any) -> Any:
    return post_json(worker.url + "/tokenize", body)


@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(worker: FakeWorker, backend: tokenizers.Tokenizer, text: str) -> None:
    answer = tokenize(worker, prompt=text, return_token_strs=True, model="mla-small")
    expected = backend.encode(text)
    assert answer == {
        "count": len(expected.ids),
        "max_model_len": 1024,
        "tokens": expected.ids,
        "token_strs": expected.tokens,
    }
    bare = tokenize(worker, prompt=text, add_special_tokens=False)
    assert bare["tokens"] == backend.encode(text, add_special_tokens=False).ids
    assert bare["token_strs"] is None

    back = post_json(worker.url + "/detokenize", {"tokens": bare["tokens"]})
    assert back == {"prompt": text, "text": text}


def test_other_paths_for_the_same(worker: FakeWorker) -> None:
    """SGLang offers both."""
    answer = post_json(worker.url + "/v1/tokenize", {"prompt": "a b"})
    assert answer == tokenize(worker, prompt="a b")
    back = post_json(worker.url + "/v1/detokenize", {"tokens": answer["tokens"][1:]})
    assert back["text"] == "a b"


def test_tokenizer_info(worker: FakeWorker) -> None:
    """Compares with transformers, which reads the same folder."""
    reference: Any = transformers.AutoTokenizer.from_pretrained(str(SMALL_MODEL))
    told = get_json(worker.url + "/tokenizer_info")
    assert told["tokenizer_class"] == type(reference).__name__
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert told[name] == getattr(reference, name), name
    assert told["chat_template"] == reference.chat_template
    assert told["model_max_length"] == tokenize(worker, prompt="a")["max_model_len"]


def test_several_at_once(worker: FakeWorker, backend: tokenizers.Tokenizer) -> None:
    """The form of SGLang's clients: lists in, lists out."""
    answer = tokenize(worker, prompt=TEXTS, return_token_strs=True)
    expected = [backend.encode(text) for text in TEXTS]
    assert answer["tokens"] == [one.ids for one in expected]
    assert answer["count"] == [len(one.ids) for one in expected]
    assert answer["token_strs"] == [one.tokens for one in expected]
    assert tokenize(worker, prompt=TEXTS[:1])["tokens"] == [expected[0].ids]

    asked = {"tokens": answer["tokens"], "skip_special_tokens": True}
    assert post_json(worker.url + "/detokenize", asked)["text"] == [
        text.replace("<｜end▁of▁sentence｜>", "") for text in TEXTS
    ]
    shown = post_json(worker.url + "/detokenize", {"tokens": answer["tokens"]})["text"]
    assert shown[0] == "<｜begin▁of▁sentence｜>" + TEXTS[0]


def test_a_conversation_has_the_tokens_of_a_chat(worker: FakeWorker) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "naïve 😀?"},
    ]
    body = {"model": "mla-small", "messages": messages, "max_tokens": 1}
    post_json(worker.url + "/v1/chat/completions", body)
    computed = worker.generates()[-1].prompt
    assert tokenize(worker, messages=messages)["tokens"] == computed
    closed = tokenize(worker, messages=messages, add_generation_prompt=False)["tokens"]
    assert computed[: len(closed)] == closed
    assert len(closed) < len(computed)

    tools = [{"type": "function", "function": {"name": "now"}}]
    assert tokenize(worker, messages=messages, tools=tools)["tokens"] != computed
    without = tokenize(worker, messages=messages, tools=tools, tool_choice="none")
    assert without["tokens"] == computed, "functions that may not be called are not named"


def test_special_tokens_are_shown(worker: FakeWorker, backend: tokenizers.Tokenizer) -> None:
    ids = backend.encode("cats").ids
    text = post_json(worker.url + "/detokenize", {"tokens": ids})["prompt"]
    assert text == backend.decode(ids, skip_special_tokens=False)
    assert text.endswith("cats")
    assert text != "cats"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": None}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"] * 65}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a", 5]}, 400, "prompt[1]"),
        ("/tokenize", {"prompt": "x" * 100_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "model": "gpt-4o"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard"}]}, 400, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": None}, 400, "tokens"),
        ("/detokenize", {"tokens": "1"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [4096]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**64]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5] * 1025}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, [6]]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "gpt-4o"}, 404, "model"),
    ],
)
def test_bad_requests(
    worker: FakeWorker, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post_json(worker.url + path, body)
    assert caught.value.code == status
    assert json.load(caught.value)["error"]["param"] == param


def test_nothing_is_left_of_no_tokens(worker: FakeWorker) -> None:
    assert post_json(worker.url + "/detokenize", {"tokens": []})["text"] == ""
