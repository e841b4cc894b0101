"""Arithmetic in the style of users: one to four digits, four operations, words, follow-ups."""

from __future__ import annotations

import random

from tasks.arithmetic import is_held_out
from tasks.wording import vary
from tasks.words import SPELLED

Turn = tuple[str, str]

# Of two numbers. Every form also comes in the variations of `vary`.
SIGNS = (
    "{} {s} {}",
    "{}{s}{}",
    "{} {s} {} =",
    "{}{s}{}=",
    "{} {s} {} = ?",
    "{}{s}{}=?",
    "{} {s}{}",
)
QUESTIONS = (
    "What is {e}?",
    "What's {e}?",
    "Whats {e}?",
    "What does {e} make?",
    "What does {e} equal?",
    "What do you get for {e}?",
    "What is the result of {e}?",
    "What is the answer to {e}?",
    "What is the value of {e}?",
    "How much is {e}?",
    "Calculate {e}",
    "Calculate {e}.",
    "Calculate: {e}",
    "Compute {e}",
    "Compute: {e}",
    "Solve {e}",
    "Solve: {e}",
    "Evaluate {e}.",
    "Work out {e}.",
    "Give me {e}.",
    "Tell me {e}.",
    "Tell me the result of {e}.",
    "Tell me what {e} is.",
    "Can you calculate {e}?",
    "Can you compute {e}?",
    "Can you solve {e}?",
    "Could you work out {e}?",
    "Do you know what {e} is?",
    "I need {e}.",
    "{e} is what?",
    "{e} equals?",
    "{e} makes?",
    "{e} is",
    "The result of {e} is?",
    "Math: {e}",
    "{e}",
)
# By operation: the sign as it is typed, and forms of their own.
SIGN = {
    "+": ("+", "+", "+", "plus", "and"),
    "-": ("-", "-", "-", "minus"),
    "*": ("*", "*", "x", "times", "×", "multiplied by"),
    "/": ("/", "/", "divided by", "÷", "over"),
}
FORMS = {
    "+": (
        "Add {} and {}.",
        "Add {} to {}.",
        "Add up {} and {}.",
        "Add: {} and {}",
        "Add {}, {}",
        "Add {} {}",
        "Sum {} and {}.",
        "What is the sum of {} and {}?",
        "Give me the sum of {} and {}.",
        "Compute the sum of {} and {}.",
        "Can you add {} and {}?",
        "Can you add {} to {}?",
        "What do {} and {} make?",
        "How much are {} and {} together?",
        "I have {} and get {} more. How many do I have?",
        "What is {} added to {}?",
        "What is {} more than {}?",
    ),
    "-": (
        "Subtract {b} from {a}.",
        "Can you subtract {b} from {a}?",
        "Take {b} from {a}.",
        "Take {b} away from {a}.",
        "What is {a} less {b}?",
        "What is {b} less than {a}?",
        "What is the difference of {a} and {b}?",
        "What is the difference between {a} and {b}?",
        "What is left of {a} after taking {b}?",
    ),
    "*": (
        "Multiply {} by {}.",
        "Multiply {} and {}.",
        "Multiply {} with {}.",
        "Can you multiply {} by {}?",
        "What is the product of {} and {}?",
        "Give me the product of {} and {}.",
    ),
    "/": (
        "Divide {a} by {b}.",
        "Can you divide {a} by {b}?",
        "What is {a} split into {b} equal parts?",
        "How often does {b} go into {a}?",
    ),
}
FOLLOW_UPS = {
    "+": (
        "And {} more?",
        "Plus {}?",
        "+ {}",
        "+{}",
        "Add {}.",
        "Now add {}.",
        "Add {} to that.",
        "Add {} more.",
        "And plus {}?",
        "What is that plus {}?",
        "And {} on top?",
        "Plus {} more?",
    ),
    "-": (
        "Minus {}?",
        "- {}",
        "And {} less?",
        "Subtract {}.",
        "Now subtract {}.",
        "Take {} away.",
        "What is that minus {}?",
        "And minus {}?",
    ),
    "*": ("Times {}?", "* {}", "Multiply by {}.", "Multiply that by {}.", "And times {}?"),
}


def number(draw: random.Random, most_digits: int = 3) -> int:
    digits = min(most_digits, draw.choices((1, 2, 3, 4), (5, 5, 3, 1))[0])
    return draw.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def operands(draw: random.Random, sign: str, held_out: bool) -> tuple[int, int, int]:
    """Returns two numbers and their result. Held-out pairs have two digits or more in both numbers."""
    while True:
        if sign == "+":
            a, b = number(draw, 4), number(draw, 4)
            value = a + b
        elif sign == "-":
            a, b = number(draw), number(draw)
            if draw.random() < 0.8:
                a, b = max(a, b), min(a, b)
            value = a - b
        else:
            a, b = draw.randint(0, 12), draw.randint(0, 12)
            if draw.random() < 0.25:
                a, b = draw.randint(10, 99), draw.randint(1, 9)
                if draw.random() < 0.5:
                    a, b = b, a
            value = a * b
            if sign == "/":
                if b == 0:
                    continue
                a, value = value, a
        if min(a, b) < 10 or sign in "*/" or is_held_out(a, b) == held_out:
            return a, b, value


def asked_sum(draw: random.Random, held_out: bool) -> Turn:
    kind = draw.random()
    if kind < 0.07:
        return _of_words(draw)
    if kind < 0.14:
        return _of_three(draw)
    if kind < 0.18:
        return _one_number(draw)
    sign = draw.choices("+-*/", (9, 5, 4, 1))[0]
    a, b, value = operands(draw, sign, held_out)
    if draw.random() < 0.3:
        form = draw.choice(FORMS[sign])
        question = form.format(a=a, b=b) if "{a}" in form else form.format(a, b)
    else:
        question = _expression(draw, sign, str(a), str(b))
    return vary(draw, question), str(value)


def _expression(draw: random.Random, sign: str, a: str, b: str) -> str:
    written = draw.choice(SIGN[sign])
    if (written.isalpha() and written != "x") or " " in written:
        expression = f"{a} {written} {b}"
        expression += draw.choice(("", "", "", " =", "="))
    else:
        expression = draw.choice(SIGNS).format(a, b, s=written)
    bare = expression.rstrip(" =?")
    form = draw.choice(QUESTIONS) if draw.random() < 0.65 else "{e}"
    return form.format(e=expression if form in ("{e}", "Solve: {e}", "Math: {e}") else bare)


def _of_words(draw: random.Random) -> Turn:
    a, b = draw.randint(0, 20), draw.randint(0, 20)
    sign = draw.choices("+-*", (5, 3, 2))[0]
    if sign == "*":
        a, b = a % 13, b % 13
    if sign == "-":
        a, b = max(a, b), min(a, b)
    value = a + b if sign == "+" else a - b if sign == "-" else a * b
    written = {"+": "plus", "-": "minus", "*": "times"}[sign]
    expression = f"{SPELLED[a]} {written} {SPELLED[b]}"
    return vary(draw, draw.choice(QUESTIONS).format(e=expression)), str(value)


def _of_three(draw: random.Random) -> Turn:
    numbers = [number(draw, 2) for _ in range(3)]
    joined = draw.choice((" + ", "+", " plus ")).join(map(str, numbers))
    question = draw.choice(QUESTIONS).format(e=joined)
    if draw.random() < 0.3:
        question = draw.choice(("Add {}, {} and {}.", "Sum {}, {}, {}", "Add up {}, {}, {}."))
        question = question.format(*numbers)
    return vary(draw, question), str(sum(numbers))


def _one_number(draw: random.Random) -> Turn:
    n = draw.randint(0, 50)
    form, value = draw.choice(
        (
            ("What is twice {}?", 2 * n),
            ("Double {}.", 2 * n),
            ("What is the double of {}?", 2 * n),
            ("What comes after {}?", n + 1),
            ("Which number comes after {}?", n + 1),
            ("What comes before {}?", n - 1),
            ("Which number comes before {}?", n - 1),
        )
    )
    return vary(draw, form.format(n)), str(value)


def follow_up(draw: random.Random, before: str) -> Turn:
    """Makes a question about the previous result."""
    last = int(before)
    sign = draw.choices("+-*", (6, 3, 1 if abs(last) <= 12 else 0))[0]
    n = draw.randint(1, 9) if sign == "*" else number(draw, 2)
    value = last + n if sign == "+" else last - n if sign == "-" else last * n
    question = draw.choice(FOLLOW_UPS[sign]).format(n)
    return (question.lower() if draw.random() < 0.3 else question), str(value)
