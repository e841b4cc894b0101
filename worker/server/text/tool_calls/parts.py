"""What an answer's text is made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model says to itself before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins; the `Arguments` that follow, up to the next `Call`, are its."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments: together a JSON object, if the model does not err."""

    text: str


Part = Reasoning | Content | Call | Arguments


class ToolCallParser(Protocol):
    """Takes an answer's text in pieces."""

    @property
    def held(self) -> int:
        """The number of characters that are held back."""
        ...

    def push(self, text: str) -> list[Part]:
        """What is certain by now. Text that may be the beginning of a marker is held back."""
        ...

    def finish(self) -> list[Part]:
        """The text has ended: what was held back."""
        ...


class ToolFormat(Protocol):
    """How a family of models writes calls."""

    @property
    def markers(self) -> frozenset[str]:
        """Tokens that must be seen although they are special to the tokenizer."""
        ...

    def parser(self, names: Collection[str]) -> ToolCallParser:
        """For an answer that may call the functions `names`; a call of another one is content, without
        the markers."""
        ...

    def grammar(self, functions: dict[str, dict[str, Any]], *, several: bool) -> dict[str, Any]:
        """One call at least, and nothing else: a format of xgrammar's structural tags.

        `functions` are the JSON schemas of the arguments by name; `several` calls are possible.
        """
        ...

    def grammar_in_text(
        self, functions: dict[str, dict[str, Any]], special: Mapping[str, int], *, several: bool
    ) -> dict[str, Any]:
        """Any text, with calls in it or not. `special` has the ids of markers that are special tokens: a
        grammar must name these by id, because no text stands for them."""
        ...
