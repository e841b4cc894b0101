"""Variations of a question that keep its meaning: case, punctuation, courtesy and typing errors."""

from __future__ import annotations

import random

OPENINGS = (
    "Hi, ",
    "Hello, ",
    "Hey, ",
    "Hi! ",
    "Hello! ",
    "Please ",
    "Please: ",
    "So, ",
    "Ok, ",
    "Okay, ",
    "Well, ",
    "Now ",
    "And ",
    "Tell me, ",
    "Tell me: ",
    "Can you tell me: ",
    "Could you tell me: ",
    "Do you know: ",
    "I want to know: ",
    "One question: ",
    "Quick question: ",
    "A question: ",
    "My question: ",
    "Question: ",
)
CLOSINGS = (
    " please",
    ", please",
    " Please.",
    " Thanks!",
    " Thank you.",
    " Be brief.",
    " Answer now.",
)


def vary(draw: random.Random, question: str) -> str:
    """Returns `question` in the style of another user."""
    end = question[-1:] if question[-1:] in ".?!" else ""
    body = question.removesuffix(end) if end else question
    if draw.random() < 0.05:
        body = misspell(draw, body)
    if draw.random() < 0.2:
        opening = draw.choice(OPENINGS)
        body = opening + (body[:1].lower() + body[1:] if draw.random() < 0.7 else body)
    if draw.random() < 0.3:
        end = draw.choice(("", "", "", "??", " ?", "?", ".", "!", "?!"))
    text = body + end
    if draw.random() < 0.06:
        text += draw.choice(CLOSINGS)
    kind = draw.random()
    if kind < 0.3:
        text = text.lower()
    elif kind < 0.33:
        text = text.upper()
    return f" {text} ".replace("  ", " ") if draw.random() < 0.02 else text


def misspell(draw: random.Random, text: str) -> str:
    """Returns `text` without one letter, or with two neighbouring letters swapped."""
    places = [i for i in range(1, len(text) - 1) if text[i - 1 : i + 2].isalpha()]
    if not places:
        return text
    i = draw.choice(places)
    if draw.random() < 0.5:
        return text[:i] + text[i + 1 :]
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]
