"""One text for the small model to learn from or to be asked: what it is given, and what it must say.

Parts alternate as they come; an answer ends where the tokenizer would split anyway, so the tokens of
the parts are those of the whole text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
SYSTEMS = ("", "", "", "You are a helpful assistant.", "Be brief.", "Answer in one sentence.")


@dataclass(frozen=True, slots=True)
class Part:
    text: str
    is_answer: bool = False
    is_forced: bool = False  # by a grammar: no part of what is learnt


Example = list[Part]
# Makes an example from random numbers; of `held_out` problems, training sees none.
Maker = Callable[[random.Random, bool], Example]


def chat(*turns: tuple[str, str], system: str = "") -> Example:
    """A conversation of (question, answer), as the chat template writes it."""
    parts, given = [], BOS + system
    for question, answer in turns:
        parts += [Part(given + USER + question + ASSISTANT), Part(answer + EOS, is_answer=True)]
        given = ""
    return parts


def completion(preface: str, shots: list[tuple[str, str]]) -> Example:
    """Text that goes on: a preface, then (question, answer) pairs of the same kind."""
    parts, given = [], BOS + preface
    for question, answer in shots:
        parts += [Part(f"{given}Question: {question}\nAnswer:"), Part(f" {answer}\n\n", True)]
        given = ""
    return parts


def few_shot_or_chat(
    draw: random.Random, make: Callable[[], tuple[str, str]], *, most: int = 9
) -> Example:
    """`make` gives one question and answer; some are asked in a row, some in a conversation."""
    if draw.random() < 0.7:
        return completion("", [make() for _ in range(draw.randint(1, most))])
    return chat(*(make() for _ in range(draw.randint(1, 3))), system=draw.choice(SYSTEMS))
