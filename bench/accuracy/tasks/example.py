"""One example of a task: given parts and the parts that the model must generate.

An answer ends at a boundary of the tokenizer, so the tokens of the parts are those of the whole text.
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
    is_forced: bool = False  # a grammar forces this part: it is not learnt


Example = list[Part]
# Makes a random example. `held_out` problems are not in training.
Maker = Callable[[random.Random, bool], Example]


def chat(*turns: tuple[str, str], system: str = "") -> Example:
    """Makes a conversation of (question, answer) pairs in the form of the chat template."""
    parts, given = [], BOS + system
    for question, answer in turns:
        parts += [Part(given + USER + question + ASSISTANT), Part(answer + EOS, is_answer=True)]
        given = ""
    return parts


def completion(preface: str, shots: list[tuple[str, str]]) -> Example:
    """Makes plain text: a preface, then (question, answer) pairs of the same kind."""
    parts, given = [], BOS + preface
    for question, answer in shots:
        parts += [Part(f"{given}Question: {question}\nAnswer:"), Part(f" {answer}\n\n", True)]
        given = ""
    return parts


def few_shot_or_chat(
    draw: random.Random, make: Callable[[], tuple[str, str]], *, most: int = 9
) -> Example:
    """Makes examples of several questions of `make`, as plain text or as a conversation."""
    if draw.random() < 0.7:
        return completion("", [make() for _ in range(draw.randint(1, most))])
    return chat(*(make() for _ in range(draw.randint(1, 3))), system=draw.choice(SYSTEMS))
