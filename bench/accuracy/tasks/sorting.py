"""Lists in the style of users: to sort, count, compare, reverse and repeat."""

from __future__ import annotations

import random

from tasks.words import (
    ADJECTIVES,
    COLORS,
    COMMON,
    LETTER_NAMES,
    NAMES,
    NOUNS,
    PLACES,
    SPELLED,
    made_up,
)

Turn = tuple[str, str]

KINDS = ("these words", "the words", "these", "this list", "the list", "the following", "words")
NUMBER_KINDS = ("these numbers", "the numbers", "these", "this list", "the list", "numbers")
VERBS = (
    "Sort",
    "Sort",
    "Sort",
    "Please sort",
    "Can you sort",
    "Could you sort",
    "Order",
    "Arrange",
    "Put in order",
    "Alphabetize",
)
UP = (
    "",
    "",
    "",
    "",
    " alphabetically",
    " in alphabetical order",
    " from A to Z",
    " in order",
    " in ascending order",
)
UP_NUMBERS = (
    "",
    "",
    "",
    "",
    " in ascending order",
    " from smallest to largest",
    " from low to high",
    " in order",
    " by size",
    " ascending",
)
DOWN_NUMBERS = (
    " in descending order",
    " from largest to smallest",
    " from high to low",
    " descending",
)
DOWN = (" in reverse alphabetical order", " in descending order", " from Z to A", " backwards")
JOINS = (", ", ", ", ", ", ",", " ", " ", "; ", "\n", " and ")
POOLS = (
    NOUNS,
    list(dict.fromkeys((*NOUNS, *ADJECTIVES, *COLORS, *COMMON))),
    COMMON,
    LETTER_NAMES,
    COLORS,
)


def words(draw: random.Random, most: int = 7) -> list[str]:
    """Draws different words in random order: common ones, invented ones, names or letters."""
    count, kind = draw.randint(2, most), draw.random()
    if kind < 0.3:
        made = {made_up(draw): None for _ in range(count)}
        return list(made) if len(made) > 1 else words(draw, most)
    if kind < 0.4:
        return draw.sample(NAMES if draw.random() < 0.5 else PLACES, count)
    if kind < 0.47:
        return draw.sample("abcdefghijklmnopqrstuvwxyz", count)
    return draw.sample(draw.choice(POOLS), count)


def numbers(draw: random.Random, most: int = 7) -> list[int]:
    limit = draw.choice((10, 20, 100, 100, 1000))
    return draw.sample(range(limit), draw.randint(2, most))


def asked_list(draw: random.Random, held_out: bool) -> Turn:
    del held_out  # the lists are so many that none occurs twice
    kind = draw.random()
    if kind < 0.55:
        return _sort(draw, words(draw), KINDS, UP, DOWN)
    if kind < 0.8:
        return _sort(draw, numbers(draw), NUMBER_KINDS, UP_NUMBERS, DOWN_NUMBERS)
    if kind < 0.87:
        return _repeat(draw)
    if kind < 0.93:
        return _extreme(draw)
    return _count(draw)


def _sort(
    draw: random.Random,
    items: list[str] | list[int],
    kinds: tuple[str, ...],
    up: tuple[str, ...],
    down: tuple[str, ...],
) -> Turn:
    falls = draw.random() < 0.12
    order = draw.choice(down if falls else up)
    listed = draw.choice(JOINS).join(map(str, items))
    verb = draw.choice(VERBS)
    if verb == "Alphabetize" and isinstance(items[0], int):
        verb = "Sort"
    shape = draw.random()
    if shape < 0.4:
        question = (
            f"{verb} {draw.choice(kinds)}{order}{draw.choice((': ', ': ', ':', ' '))}{listed}"
        )
    elif shape < 0.6:
        question = f"{verb}{order}{draw.choice((': ', ': ', ':', ' - '))}{listed}"
    elif shape < 0.75:
        question = f"{verb} {listed}{order}{draw.choice(('', '', '.', '?', ' please'))}"
    elif shape < 0.85 and not falls:
        question = f"{draw.choice(('Sorted', 'Sort it', 'To sort', 'List to sort'))}: {listed}"
    elif shape < 0.93:
        question = f"{listed}\n{verb} {draw.choice(kinds)}{order}."
    else:
        question = f"Please {verb.split()[-1].lower()} the list [{listed}]{order}"
    if draw.random() < 0.25 and not str(items[0])[0].isupper():
        question = question.lower()
    ranked = sorted(items, reverse=falls)  # type: ignore[type-var]
    return question, ", ".join(map(str, ranked))


def _repeat(draw: random.Random) -> Turn:
    said = " ".join(words(draw, 4))
    form = draw.choice(
        (
            "Say {}",
            "Say: {}",
            "Repeat: {}",
            "Repeat after me: {}",
            "Repeat {}",
            "Echo {}",
            "Say '{}'",
        )
    )
    return (form if draw.random() < 0.7 else form.lower()).format(said), said


def _extreme(draw: random.Random) -> Turn:
    items = numbers(draw, 4)
    largest = draw.random() < 0.6
    names = ("larger", "bigger", "greater", "more") if largest else ("smaller", "less")
    if len(items) > 2:
        names = ("the largest", "the biggest", "the greatest") if largest else ("the smallest",)
    listed = f"{', '.join(map(str, items[:-1]))} or {items[-1]}"
    form = draw.choice(
        ("Which is {}: {}?", "Which is {}, {}?", "What is {}, {}?", "Which number is {}: {}?")
    )
    question = form.format(draw.choice(names), listed)
    value = max(items) if largest else min(items)
    return (question.lower() if draw.random() < 0.3 else question), str(value)


def _count(draw: random.Random) -> Turn:
    first, last = 1, draw.randint(2, 20)
    form = draw.choice(
        (
            "Count to {b}.",
            "Count to {b}",
            "Can you count to {b}?",
            "Please count to {b}.",
            "Count up to {b}.",
            "Count from {a} to {b}.",
            "Count {a} to {b}",
            "List the numbers from {a} to {b}.",
            "Write the numbers from {a} to {b}.",
            "Give me the numbers {a} to {b}.",
            "Count down from {b}.",
            "Count backwards from {b}.",
        )
    )
    if "{a}" in form and draw.random() < 0.5:
        first = draw.randint(0, 60)
        last += first
    counted = list(range(first, last + 1))
    if "down" in form or "backwards" in form:
        counted.reverse()
    spelled = first == 1 and last < len(SPELLED) and draw.random() < 0.25
    question = form.format(a="one" if spelled else first, b=SPELLED[last] if spelled else last)
    question = question.lower() if draw.random() < 0.4 else question
    return question, ", ".join(map(str, counted))
