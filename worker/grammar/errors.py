"""Errors of grammars."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DEPTH = 64  # levels of nesting


class GrammarError(Exception):
    """The grammar is not usable. The message is for the client."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The reason why a request gets no masks, or no further masks."""

    reason: str  # for the client
    is_of_grammar: bool = True  # False: the fault of this worker; another one may serve the request
