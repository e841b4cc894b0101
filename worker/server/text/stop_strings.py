"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations


class StopMatcher:
    """Cuts a text at the first stop string that it completes.

    If several end at the same character, the longest counts. Text that may be the beginning of a
    stop string is held back until it is known not to be one, so that no client ever sees a part
    of a stop string. How the text was split makes no difference to the result.
    """

    __slots__ = ("_held", "_keep", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], *, keep: bool = False) -> None:
        """`keep`: cut behind the stop string instead of before it."""
        self._stops = stops
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece and return what may be shown. After a match, returns nothing more."""
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
        """The text has ended: what was held back is not a stop string after all."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
