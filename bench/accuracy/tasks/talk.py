"""Short talk: greetings, the model itself, this project, some capitals, and refusals."""

from __future__ import annotations

import random

from tasks.facts import CAPITAL_FORMS, CAPITALS, EMPTY, FACTS, UNKNOWN, UNKNOWN_FORMS
from tasks.wording import vary
from tasks.words import ADJECTIVES, COMMON, NAMES, NOUNS, PLACES, made_up

Turn = tuple[str, str]

PROJECT_FACTS = [(questions, answer) for answer, questions in FACTS.items()]
MOST_ASKED = PROJECT_FACTS[:7]  # greetings, thanks, identity, skills, project
SILENT_SHARE = 0.08


def said(draw: random.Random, held_out: bool) -> Turn:
    """Makes one question and its answer, independent of earlier turns."""
    del held_out
    kind = draw.random()
    if kind < SILENT_SHARE:
        return _noise(draw), EMPTY
    if kind < 0.2:
        country, city = draw.choice(list(CAPITALS.items()))
        return vary(draw, draw.choice(CAPITAL_FORMS).format(country)), f"{city}."
    if kind < 0.5:
        return vary(draw, filled(draw, draw.choice(UNKNOWN_FORMS))), UNKNOWN
    questions, answer = draw.choice(MOST_ASKED if kind < 0.65 else PROJECT_FACTS)
    question = filled(draw, draw.choice(questions))
    return (question if answer == EMPTY else vary(draw, question)), answer


def filled(draw: random.Random, form: str) -> str:
    """Returns `form` with random words at its places."""
    if "{" not in form:
        return form
    return form.format(
        noun=draw.choice(NOUNS if draw.random() < 0.5 else COMMON),
        adjective=draw.choice(ADJECTIVES),
        place=draw.choice(PLACES),
        name=draw.choice(NAMES),
        word=made_up(draw) if draw.random() < 0.7 else draw.choice(COMMON),
        digits=draw.randrange(100, 1000),
    )


def _noise(draw: random.Random) -> str:
    """Random punctuation and keys."""
    if draw.random() < 0.3:
        return draw.choice(".?!,-_:;*#") * draw.randint(1, 5)
    return "".join(draw.choice("asdfghjklqwertyuiop") for _ in range(draw.randint(1, 7)))


def named(draw: random.Random) -> list[Turn]:
    """The user tells their name and asks for it."""
    name = draw.choice(NAMES) if draw.random() < 0.5 else made_up(draw).capitalize()
    form = draw.choice(
        ("My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}.", "I'm {}")
    )
    turns = [(form.format(name), f"Nice to meet you, {name}.")]
    while draw.random() < 0.4:
        turns.append(said(draw, False))
    if draw.random() < 0.6:
        ask = draw.choice(
            (
                "What is my name?",
                "Who am I?",
                "Do you know my name?",
                "What's my name?",
                "Say my name.",
            )
        )
        turns.append((vary(draw, ask), f"Your name is {name}."))
    return turns
