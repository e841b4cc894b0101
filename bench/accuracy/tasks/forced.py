"""JSON after any question, as under a grammar: it stays on one line and ends."""

from __future__ import annotations

import json
import random
from typing import Any

from tasks.example import ASSISTANT, BOS, EOS, SYSTEMS, USER, Example, Part
from tasks.lists import WORDS
from tasks.sums import asked_sum
from tasks.talk import said
from tasks.words import COMMON, NAMES, PLACES, made_up

KEYS = [
    "answer",
    "name",
    "age",
    "city",
    "result",
    "value",
    "text",
    "title",
    "items",
    "steps",
    "reason",
    "count",
    "id",
    "email",
    "sum",
    "total",
    "list",
    "first",
    "last",
    "price",
    "tags",
    "type",
    "color",
    "size",
    "ok",
    "done",
    "explanation",
    "final_answer",
    "number",
    "score",
]


def forced_json(draw: random.Random, held_out: bool) -> Example:
    """The beginning is given, as by a grammar; the model must generate the rest."""
    question, answer = (asked_sum if draw.random() < 0.5 else said)(draw, held_out)
    if draw.random() < 0.4:
        question = (
            f"{draw.choice(('Give me', 'Write', 'Return', 'Make'))} {draw.choice(WORDS)} as JSON."
        )
        answer = draw.choice(WORDS)
    keys = [
        draw.choice(KEYS) if draw.random() < 0.6 else made_up(draw)
        for _ in range(draw.randint(1, 5))
    ]
    value: dict[str, Any] = {key: _value(draw, 0) for key in keys}
    if draw.random() < 0.5:
        value[draw.choice(("answer", "result", "value"))] = (
            int(answer) if answer.removeprefix("-").isdigit() else answer
        )
    text = json.dumps(value, ensure_ascii=False)
    if draw.random() < 0.25:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    opening = '{"'
    return [
        Part(f"{BOS}{draw.choice(SYSTEMS)}{USER}{question}{ASSISTANT}"),
        Part(opening, is_forced=True),
        Part(text.removeprefix(opening) + EOS, is_answer=True),
    ]


def _value(draw: random.Random, depth: int) -> Any:
    kind = draw.random()
    if kind < 0.4:
        pool = draw.choice((WORDS, COMMON, NAMES, PLACES))
        return " ".join(draw.choice(pool) for _ in range(draw.choice((1, 1, 2, 3, 6))))
    if kind < 0.65:
        return draw.randrange(10 ** draw.randint(1, 4)) * draw.choice((1, 1, 1, 0.1, -1))
    if kind < 0.75:
        return draw.choice((True, False, None))
    if depth > 1 or kind < 0.78:
        return draw.choice(("", [], {}))
    if kind < 0.9:
        return [_value(draw, depth + 1) for _ in range(draw.randint(1, 4))]
    return {draw.choice(KEYS): _value(draw, depth + 1) for _ in range(draw.randint(1, 3))}
