"""Facts in prose, converted to JSON with given keys."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

from tasks.example import SYSTEMS, Example, chat
from tasks.words import JOBS, NAMES, PLACES, made_up

KEYS = ("name", "age", "city", "job", "email", "married")


def extract(draw: random.Random, held_out: bool) -> Example:
    """Returns an example. A pair of a name and a city, if not made up, is in held-out examples or in the others only."""
    turns = [one_record(draw, held_out) for _ in range(draw.randint(1, 2))]
    return chat(*turns, system=draw.choice(SYSTEMS))


def one_record(draw: random.Random, held_out: bool) -> tuple[str, str]:
    facts = person(draw, held_out)
    keys = draw.sample(KEYS, draw.randint(1, len(KEYS)))
    name = facts["name"]
    sentences = {
        "age": f"{name} is {facts['age']} years old.",
        "city": f"{name} lives in {facts['city']}.",
        "job": f"{name} works as a {facts['job']}.",
        "email": f"The email address is {facts['email']}.",
        "married": f"{name} is {'' if facts['married'] else 'not '}married.",
    }
    # The requested keys, and some others.
    told = [text for key, text in sentences.items() if key in keys or draw.random() < 0.4]
    if not any(name in text for text in told):
        told.append(f"This is about {name}.")
    draw.shuffle(told)
    if draw.random() < 0.5:
        request = f"Extract as JSON with the keys {', '.join(keys)}:"
    else:
        request = f"Answer in JSON with {json.dumps(keys)}."
    return f"{request}\n{' '.join(told)}", json.dumps({key: facts[key] for key in keys})


def person(draw: random.Random, held_out: bool) -> dict[str, Any]:
    while True:
        name, city = draw.choice(NAMES), draw.choice(PLACES)
        if (zlib.crc32(f"{name} {city}".encode()) % 10 == 0) == held_out:
            break
    if draw.random() < 0.3:
        name, city = made_up(draw).capitalize(), made_up(draw).capitalize()
    return {
        "name": name,
        "age": draw.randint(18, 90),
        "city": city,
        "job": draw.choice(JOBS),
        "email": f"{name.lower()}{draw.randrange(100)}@{draw.choice(('mail', 'post'))}.com",
        "married": draw.random() < 0.5,
    }
