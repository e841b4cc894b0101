"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations


class StopMatcher:
    """Cuts a text at the first complete stop string.

    If several end at the same character, the longest counts. Text that may begin a stop string is held back, so that no
    client receives a part of a stop string. The result does not depend on the boundaries of the pieces.
    """

    __slots__ = ("_held", "_keep", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], *, keep: bool = False) -> None:
        """`keep`: the text ends after the stop string instead of before it."""
        self._stops = stops
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes the next piece. Returns the text that may be shown; empty after a match."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, at, self.matched = min(found)
            self._held = ""
            return text[: end if self._keep else at]
        shown = len(text) - max(overlap(text, stop) for stop in self._stops)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Ends the text. Returns the text that was held back."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
