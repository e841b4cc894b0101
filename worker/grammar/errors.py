"""What can be wrong with a grammar."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DEPTH = 64  # of what may nest


class GrammarError(Exception):
    """The grammar cannot be used; the message is for the client who sent it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a request can have no masks, or no more of them."""

    reason: str  # for the client
    is_of_grammar: bool = True  # or else of this worker: there, and later here, it may do well
