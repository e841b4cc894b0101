"""What the small model learns, one kind of problem a file. Everything is made from random numbers."""

from __future__ import annotations

from tasks.arithmetic import addition, mixed, story
from tasks.example import Example, Maker, Part
from tasks.lists import copy, sort_numbers, sort_words
from tasks.recall import long_recall, recall
from tasks.records import extract
from tasks.talk import talk
from tasks.tools import tool_call

# Each with how often it is drawn.
TASKS: dict[str, tuple[Maker, float]] = {
    "addition": (addition, 26),
    "mixed": (mixed, 14),
    "story": (story, 20),
    "recall": (recall, 10),
    "long_recall": (long_recall, 2),
    "sort_words": (sort_words, 12),
    "sort_numbers": (sort_numbers, 6),
    "copy": (copy, 8),
    "extract": (extract, 12),
    "tool_call": (tool_call, 10),
    "talk": (talk, 12),
}

__all__ = ["TASKS", "Example", "Maker", "Part"]
