"""Sums, and stories with sums: this project's counterpart of GSM8K."""

from __future__ import annotations

import random
import zlib

from tasks.example import Example, few_shot_or_chat
from tasks.words import NAMES, THINGS

SUM_FORMS = ("What is {} + {}?", "What is {} + {}?", "{} + {} =", "Add {} and {}.", "what is {}+{}")
HELD_OUT_SHARE = 10  # one pair of numbers in ten is not in training


def is_held_out(a: int, b: int) -> bool:
    # By a hash, or whole columns of the table would be held out.
    return zlib.crc32(f"{a} {b}".encode()) % HELD_OUT_SHARE == 0


def pair(draw: random.Random, low: int, high: int, held_out: bool) -> tuple[int, int]:
    while True:
        a, b = draw.randint(low, high), draw.randint(low, high)
        if is_held_out(a, b) == held_out:
            return a, b


def addition(draw: random.Random, held_out: bool) -> Example:
    """Two digits and two digits."""
    form = draw.choice(SUM_FORMS)

    def make() -> tuple[str, str]:
        a, b = pair(draw, 10, 99, held_out)
        return form.format(a, b), str(a + b)

    return few_shot_or_chat(draw, make)


def mixed(draw: random.Random, held_out: bool) -> Example:
    """Differences, products of single digits, and three digits."""
    kind = draw.choice("+-*")

    def make() -> tuple[str, str]:
        if kind == "*":
            a, b = draw.randint(0, 12), draw.randint(0, 12)
            return f"What is {a} * {b}?", str(a * b)
        if kind == "-":
            a, b = pair(draw, 0, 99, held_out)
            return f"What is {a} - {b}?", str(a - b)
        a, b = pair(draw, 0, 999, held_out)
        return f"What is {a} + {b}?", str(a + b)

    return few_shot_or_chat(draw, make)


def story(draw: random.Random, held_out: bool) -> Example:
    """Problems of two steps, which are written before the answer."""
    return few_shot_or_chat(draw, lambda: one_story(draw, held_out))


def one_story(draw: random.Random, held_out: bool) -> tuple[str, str]:
    name, other = draw.sample(NAMES, 2)
    thing = draw.choice(THINGS)
    a, b = pair(draw, 2, 60, held_out)
    kind = draw.randrange(6)
    if kind == 0:
        c = draw.randint(1, a + b)
        text = f"{name} has {a} {thing}. {name} buys {b} more and gives {c} to {other}."
        ask, steps = f"How many {thing} does {name} have now?", [(a, "+", b), (a + b, "-", c)]
    elif kind == 1:
        c = draw.randint(2, 60)
        text = f"{name} has {a} {thing}, {other} has {b} and finds {c} more."
        ask, steps = f"How many {thing} do they have together?", [(b, "+", c), (a, "+", b + c)]
    elif kind == 2:
        a, b = max(a, b), min(a, b)
        c = draw.randint(2, 60)
        text = f"There are {a} {thing} in a box. {name} takes {b} out, then {other} puts {c} in."
        ask, steps = f"How many {thing} are in the box?", [(a, "-", b), (a - b, "+", c)]
    elif kind == 3:
        bags, each = draw.randint(2, 9), draw.randint(2, 9)
        text = f"{name} has {bags} bags with {each} {thing} in each, and {b} {thing} besides."
        ask = f"How many {thing} does {name} have?"
        steps = [(bags, "*", each), (bags * each, "+", b)]
    elif kind == 4:
        c = draw.randint(1, min(20, a + b))
        text = f"{name} has {a} {thing}. {other} has {b} more than {name}. {other} loses {c}."
        ask, steps = f"How many {thing} does {other} have?", [(a, "+", b), (a + b, "-", c)]
    else:
        c = draw.randint(2, 40)
        text = f"On Monday {name} sells {a} {thing}, on Tuesday {b}, and on Friday {c}."
        ask, steps = f"How many {thing} does {name} sell?", [(a, "+", b), (a + b, "+", c)]
    values = [_value(step) for step in steps]
    written = " ".join(
        f"{x} {sign} {y} = {value}." for (x, sign, y), value in zip(steps, values, strict=True)
    )
    return f"{text} {ask}", f"{written} The answer is {values[-1]}."


def _value(step: tuple[int, str, int]) -> int:
    a, sign, b = step
    return a + b if sign == "+" else a - b if sign == "-" else a * b
