"""Conversations of turns of all kinds, with and without a system prompt."""

from __future__ import annotations

import random
from collections.abc import Callable

from tasks.example import Example, chat
from tasks.sorting import asked_list
from tasks.sums import asked_sum, follow_up
from tasks.talk import named, said

Turn = tuple[str, str]

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are an assistant.",
    "You are a helpful AI assistant.",
    "You are a chatbot.",
    "You are an AI model.",
    "Be brief.",
    "Be concise.",
    "Be polite.",
    "Answer briefly.",
    "Answer in one sentence.",
    "Answer in English.",
    "You are helpful.",
    "You are a math teacher.",
    "You are a calculator.",
    "Be helpful and honest. Answer the question of the user.",
    "You are an expert. Think step by step.",
)


def asked_sums(draw: random.Random, held_out: bool) -> Example:
    return _conversation(draw, held_out, lambda: _sum_turns(draw, held_out))


def asked_lists(draw: random.Random, held_out: bool) -> Example:
    return _conversation(draw, held_out, lambda: [asked_list(draw, held_out)])


def talk(draw: random.Random, held_out: bool) -> Example:
    return _conversation(draw, held_out, lambda: _talk_turns(draw, held_out))


def _conversation(draw: random.Random, held_out: bool, first: Callable[[], list[Turn]]) -> Example:
    """Begins with the turns of `first`; half of the conversations continue with other turns."""
    turns, length = first(), draw.choice((1, 1, 1, 2, 3, 5))
    while len(turns) < length:
        kind = draw.random()
        if kind < 0.4:
            turns += _sum_turns(draw, held_out)
        elif kind < 0.6:
            turns.append(asked_list(draw, held_out))
        else:
            turns += _talk_turns(draw, held_out)
    if draw.random() < 0.2:
        turns.insert(0, turns.pop())
    return chat(*turns, system=draw.choice(SYSTEMS) if draw.random() < 0.35 else "")


def _sum_turns(draw: random.Random, held_out: bool) -> list[Turn]:
    turns = [asked_sum(draw, held_out)]
    while draw.random() < 0.2:
        turns.append(follow_up(draw, turns[-1][1]))
    return turns


def _talk_turns(draw: random.Random, held_out: bool) -> list[Turn]:
    return named(draw) if draw.random() < 0.12 else [said(draw, held_out)]
