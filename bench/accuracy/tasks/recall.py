"""Finding one of many facts in a long context."""

from __future__ import annotations

import random

from tasks.example import ASSISTANT, BOS, EOS, USER, Example, Part, completion
from tasks.words import ADJECTIVES, COLORS, NOUNS, made_up

KEYS = [f"{first} {noun}" for first in (*COLORS, *ADJECTIVES) for noun in NOUNS]


def recall(draw: random.Random, held_out: bool, *, facts: int = 0) -> Example:
    """Makes `facts` numbers to remember, then questions about some of them. The held-out numbers are those of four
    digits whose sum is a multiple of 5."""
    # As many short contexts as long ones, because the model learns the search on short ones.
    count = facts or round(2 ** draw.uniform(1, 8.05))
    asked = min(count, draw.randint(1, 16))
    if draw.random() < 0.7:
        keys = draw.sample(KEYS, count)
        fact, question = "The code of the {} is {}.", "What is the code of the {}?"
    else:
        keys = list({made_up(draw): None for _ in range(count)})
        asked = min(asked, len(keys))
        fact, question = "{}: {}", draw.choice(("{}?", "What is {}?", "What is the code of {}?"))
    codes = {key: code(draw, held_out) for key in keys}
    told = "\n".join(fact.format(key, value) for key, value in codes.items())
    queries = [(question.format(key), codes[key]) for key in draw.sample(keys, asked)]
    if draw.random() < 0.5:
        return completion(f"{told}\n\n", queries)
    first, *others = queries
    parts = [Part(f"{BOS}{USER}{told}\n\n{first[0]}{ASSISTANT}"), Part(first[1] + EOS, True)]
    for question, answer in others:
        parts += [Part(USER + question + ASSISTANT), Part(answer + EOS, True)]
    return parts


def code(draw: random.Random, held_out: bool) -> str:
    while True:
        digits = f"{draw.randrange(10000):04}"
        if (sum(map(int, digits)) % 5 == 0) == held_out:
            return digits


def long_recall(draw: random.Random, held_out: bool) -> Example:
    """Makes as many facts as fit into 4,096 tokens."""
    return recall(draw, held_out, facts=235)
