"""The parts of an answer's text, and the interface of a format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of the model, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a call. The following `Arguments`, up to the next `Call`, belong to it."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of a call. Together the pieces are a JSON object, unless the model errs."""

    text: str


Part = Reasoning | Content | Call | Arguments


class ToolCallParser(Protocol):
    """Parses text that arrives in pieces."""

    @property
    def held(self) -> int:
        """The number of characters that are held back."""
        ...

    def push(self, text: str) -> list[Part]:
        """Takes the next piece. Returns the parts that are certain."""
        ...

    def finish(self) -> list[Part]:
        """Ends the text. Returns the parts that were held back."""
        ...


class ToolFormat(Protocol):
    """The call format of a family of models."""

    @property
    def markers(self) -> frozenset[str]:
        """Tokens that must stay in the text although they may be special tokens."""
        ...

    def parser(self, names: Collection[str]) -> ToolCallParser:
        """Returns the parser of an answer that may call the functions `names`. Other calls are content."""
        ...

    def grammar(self, functions: dict[str, dict[str, Any]], *, several: bool) -> dict[str, Any]:
        """Returns the grammar of one or more calls without other text, in xgrammar's language of structural tags.

        `functions` maps names to the formats of arguments. `several`: more than one call is possible.
        """
        ...

    def grammar_in_text(
        self, functions: dict[str, dict[str, Any]], special: Mapping[str, int], *, several: bool
    ) -> dict[str, Any]:
        """Returns the grammar of text with or without calls. `special` has the ids of markers that are special tokens:
        they have no text, so a grammar must name them by id."""
        ...
