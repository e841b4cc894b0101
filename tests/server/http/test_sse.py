"""Pre-encoded events."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from mla_router.worker.server.http.sse import PLACEHOLDER, TextEvent, event


class Body(msgspec.Struct):
    id: str
    texts: list[str]
    end: str | None = None


TEXTS = [
    "",
    " a",
    'she said "no"',
    "back\\slash",
    "\0",
    "\n\ndata: [DONE]\n\n",
    "é 汉 🙂",
    "\u2028",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_alone_changes(text: str) -> None:
    made = TextEvent(Body("a\\u0000b", ["x", PLACEHOLDER])).of(text)
    assert made == event(Body("a\\u0000b", ["x", text]))
    assert made.startswith(b"data: ")
    assert made.endswith(b"\n\n")
    assert made.count(b"\n") == 2, "a line break in the text would end the event"
    read = json.loads(made.removeprefix(b"data: "))
    assert read == {"id": "a\\u0000b", "texts": ["x", text], "end": None}


def test_marks_go_before_it() -> None:
    made = TextEvent(Body("a", [PLACEHOLDER])).of("b", b":mla 0 1,2\n")
    assert made == b':mla 0 1,2\ndata: {"id":"a","texts":["b"],"end":null}\n\n'


def test_many_texts_of_one() -> None:
    rng = random.Random(0)
    template = TextEvent(Body("a", [PLACEHOLDER]))
    for _ in range(2000):
        text = "".join(
            chr(rng.choice([rng.randrange(0x80), rng.randrange(0xD800)])) for _ in range(9)
        )
        assert json.loads(template.of(text).removeprefix(b"data: "))["texts"] == [text]
