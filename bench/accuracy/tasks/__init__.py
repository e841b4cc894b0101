"""The tasks of the small model, one kind of problem a file. All examples are drawn at random."""

from __future__ import annotations

from functools import partial

from tasks.arithmetic import addition, mixed, story
from tasks.conversation import asked_lists, asked_sums, talk
from tasks.example import Example, Maker, Part
from tasks.forced import forced_json
from tasks.lists import copy, sort_numbers, sort_words
from tasks.recall import long_recall, recall
from tasks.records import extract
from tasks.tools import tool_call

# Each with how often it is drawn.
TASKS: dict[str, tuple[Maker, float]] = {
    "addition": (addition, 14),
    "mixed": (mixed, 10),
    "story": (story, 14),
    "recall": (recall, 9),
    "long_recall": (long_recall, 2.5),
    "sort_words": (sort_words, 10),
    "sort_numbers": (sort_numbers, 4),
    "copy": (copy, 7),
    "extract": (extract, 10),
    "tool_call": (tool_call, 9),
    "asked_sums": (asked_sums, 110),
    "asked_lists": (asked_lists, 60),
    "talk": (talk, 90),
    "forced_json": (forced_json, 8),
}

# Tasks of the small Gemma 2 (`train_gemma2.py`), which has a quarter of the shipped model's parameters. Lists of 16 items have
# up to 83 tokens, and its windows 32.
OF_GEMMA2: dict[str, tuple[Maker, float]] = {
    "addition": (addition, 12),
    "copy": (partial(copy, items=16), 20),
    "sort_numbers": (sort_numbers, 6),
}

# Tasks without known answers: they teach a form and are not measured.
UNMEASURED = frozenset({"forced_json"})
MEASURED = {name: maker for name, (maker, _) in TASKS.items() if name not in UNMEASURED}

__all__ = ["MEASURED", "OF_GEMMA2", "TASKS", "Example", "Maker", "Part"]
