"""Sentences of a usual schema, and their grammars, for the benches of grammars."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mla_router.worker.grammar.pool import GrammarPool
from mla_router.worker.grammar.xgrammar_backend import Matcher
from mla_router.worker.messages import Grammar

VOCAB_SIZE = 129_280  # DeepSeek-V3's
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "kind": {"enum": ["home", "work", "other"]},
            },
            "required": ["street", "zip", "kind"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}
# A list, so that no text ends before the bench. It has at least one object.
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1}


def records(tokenizer: Tokenizer, steps: int, choose: random.Random) -> list[int]:
    """Returns at least `steps` tokens of a list of the schema's objects."""
    words = Path(__file__).parents[2].joinpath("ARCHITECTURE.md").read_text().split()
    words = [word for word in words if word.isalpha()]

    def some(most: int) -> str:
        return " ".join(choose.choices(words, k=choose.randint(1, most)))

    persons: list[dict[str, Any]] = []
    tokens: list[int] = []
    while len(tokens) < steps:
        address = {
            "street": f"{choose.randint(1, 99)} {some(3)}",
            "zip": f"{choose.randint(0, 99999):05}",
            "kind": choose.choice(["home", "work", "other"]),
        }
        tags = [some(2) for _ in range(choose.randint(0, 4))]
        age = choose.randint(0, 150)
        persons.append({"name": some(4), "age": age, "tags": tags, "address": address})
        text = json.dumps(persons).removesuffix("]")
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
    return tokens


def random_sentence(
    matcher: Matcher, vocab_size: int, steps: int, choose: random.Random
) -> list[int]:
    """Returns `steps` tokens drawn from the masks. They stay within their first string."""
    mask = np.empty((1, -(-vocab_size // 32)), dtype=np.int32)
    tokens = []
    for _ in range(steps):
        matcher.fill(mask, 0)
        tokens.append(draw(mask[0], choose))
        assert matcher.accept(tokens[-1])
    return tokens


def draw(mask: np.ndarray, choose: random.Random) -> int:
    """Draws a token that `mask` [words] allows, except 0, the end."""
    choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(choose.choice(choices[choices != 0]))


def grammar(title: int | None = None) -> Grammar:
    schema = SCHEMA if title is None else {**SCHEMA, "title": str(title)}
    return Grammar("json_schema", json.dumps(schema))


def open_all(pool: GrammarPool, grammars: list[Grammar]) -> list[int]:
    """Opens requests, waits for their grammars and returns the keys."""
    keys = [pool.open(grammar, []) for grammar in grammars]
    waiting = set(keys)
    while waiting:
        for key, problem in pool.poll():
            assert problem is None, problem
            waiting.remove(key)
        time.sleep(0.0005)
    return keys
