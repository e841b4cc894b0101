"""Finds stop patterns (SGLang's `stop_regex`) in text that arrives token by token.

The answer ends with the token that completes a match and includes the matched text. The patterns come from clients, so
RE2 matches them, in linear time and limited memory. Each token costs up to WINDOW * MAX_PROGRAM_SIZE steps in the event
loop: an automaton that exceeds its memory is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

import re2

from mla_router.worker.server.errors import InvalidField

MAX_PATTERNS = 16
MAX_PATTERN_LENGTH = 256
MAX_MEMORY = 1 << 20  # bytes of one compiled pattern
WINDOW = 1024  # longest match in characters
# Instructions of all patterns of a request: about 20 ms a token at worst. `.{80}` has 640, `\p{L}` 1,200
MAX_PROGRAM_SIZE = 2048


@dataclass(frozen=True, slots=True)
class StopPatterns:
    patterns: tuple[re2._Regexp, ...]

    @classmethod
    def read(cls, given: str | list[str] | None, field: str) -> StopPatterns | None:
        """Compiles the patterns. Returns None without patterns. Raises InvalidField."""
        if not given:
            return None
        sources = [given] if isinstance(given, str) else given
        if len(sources) > MAX_PATTERNS:
            raise InvalidField(field, f"at most {MAX_PATTERNS} patterns, got {len(sources)}")
        options = re2.Options()
        options.log_errors = False
        options.max_mem = MAX_MEMORY
        patterns = []
        for source in sources:
            if not 1 <= len(source) <= MAX_PATTERN_LENGTH:
                raise InvalidField(
                    field, f"each pattern must have 1 to {MAX_PATTERN_LENGTH} characters"
                )
            try:
                patterns.append(re2.compile(source, options=options))
            except re2.error:
                raise InvalidField(
                    field,
                    "not a valid regular expression of RE2, which has no look-around and no back-references",
                ) from None
            if sum(pattern.programsize for pattern in patterns) > MAX_PROGRAM_SIZE:
                raise InvalidField(
                    field,
                    f"too complex: more than {MAX_PROGRAM_SIZE} instructions of RE2; use shorter repetitions",
                )
        return cls(tuple(patterns))


class RegexMatcher:
    """Matches the text of one answer."""

    __slots__ = ("_patterns", "_start", "_text")

    def __init__(self, stop: StopPatterns) -> None:
        self._patterns = stop.patterns
        self._text = ""
        self._start = 0

    def push(self, text: str) -> str | None:
        """Takes the text of the next token. Returns the pattern that matches, or None."""
        if not text:
            return None
        self._text += text
        if len(self._text) > WINDOW:
            # One more character, outside the search: so `^` matches only at the beginning of the answer.
            self._text, self._start = self._text[-WINDOW - 1 :], 1
        for pattern in self._patterns:
            if pattern.search(self._text, self._start):
                return str(pattern.pattern)
        return None
