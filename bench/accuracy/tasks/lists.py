"""Sorting, reversing and copying."""

from __future__ import annotations

import random

from tasks.example import Example, few_shot_or_chat
from tasks.words import ADJECTIVES, COLORS, NOUNS, made_up

WORDS = [*NOUNS, *ADJECTIVES, *COLORS]


def sort_words(draw: random.Random, held_out: bool) -> Example:
    del held_out  # the lists are so many that none occurs twice

    def make() -> tuple[str, str]:
        words = draw.sample(WORDS, draw.randint(2, 7))
        words = [made_up(draw) if draw.random() < 0.1 else word for word in words]
        return f"Sort these words: {', '.join(words)}", ", ".join(sorted(words))

    return few_shot_or_chat(draw, make)


def sort_numbers(draw: random.Random, held_out: bool) -> Example:
    del held_out

    def make() -> tuple[str, str]:
        numbers = draw.sample(range(100), draw.randint(2, 7))
        return f"Sort these numbers: {_join(numbers)}", _join(sorted(numbers))

    return few_shot_or_chat(draw, make)


def copy(draw: random.Random, held_out: bool, *, items: int = 30) -> Example:
    """Up to `items` words and numbers in random order."""
    del held_out

    def make() -> tuple[str, str]:
        chosen = [
            draw.choice((draw.choice(WORDS), made_up(draw), str(draw.randrange(10000))))
            for _ in range(draw.randint(3, items))
        ]
        if draw.random() < 0.3 and len(chosen) < 8:
            return f"Reverse this list: {_join(chosen)}", _join(chosen[::-1])
        return f"Repeat this: {_join(chosen)}", _join(chosen)

    return few_shot_or_chat(draw, make, most=4)


def _join(items: list[str] | list[int]) -> str:
    return ", ".join(map(str, items))
