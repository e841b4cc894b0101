r"""Divides long strings in the grammar of a JSON schema into chunks.

xgrammar makes one state for each character of a `maxLength`. The masks of a state take 15 ms to compute with 129,280
tokens. It fails above 128 repetitions within a string, or computes slow masks (other versions). So a long string becomes
a sequence of equal chunks, whose masks are computed once for all lengths, and many chunks become larger ones. For a
length of up to 150:

    text ::= ((chunk{0, 1} rest) | (chunk{2, 2} last))
    chunk ::= Regex("^[a-z]{64,64}$")
    rest ::= Regex("^[a-z]{0,63}$")
    last ::= Regex("^[a-z]{0,22}$")

Each text has exactly one division, and the language stays the same.
"""

from __future__ import annotations

import itertools
import re

MAX_REPETITIONS = 128  # that xgrammar handles within one string
CHUNK = 64  # shorter ones compile faster, but the masks at the end of a chunk are slow
# Chunks that make a chunk of the next size. The slowest lengths, near 4,000, take 6 s to compile with 49,152 tokens.
CHUNKS_IN_NEXT = 8

# A rule that repeats one class of characters, in xgrammar's notation
_RULE = re.compile(
    r'(?P<name>\w+) ::= Regex\("\^(?P<unit>\[(?:[^\]\\"]|\\{4}|\\\\[^\\"]|\\")+\])'
    r'\{(?P<least>\d+),(?P<most>\d*)\}\$", json_string=true\)'
)


def divide(ebnf: str) -> str:
    """Returns a grammar with the same language as `ebnf`, without long repetitions of a class of characters in
    strings."""
    chunks = _Chunks(set(re.findall(r"\w+", ebnf)))
    lines = [chunks.divided(line) for line in ebnf.split("\n")]
    return "\n".join(lines + chunks.rules)


class _Chunks:
    def __init__(self, names: set[str]) -> None:
        self.rules: list[str] = []
        self._names = names
        self._name_of: dict[str, str] = {}  # by the body of the rule

    def divided(self, line: str) -> str:
        rule = _RULE.fullmatch(line)
        if rule is None:
            return line
        unit, least, most = rule["unit"], int(rule["least"]), int(rule["most"] or rule["least"])
        if most <= MAX_REPETITIONS:
            return line
        terms = [self._exactly(unit, least)] if least else []
        if not rule["most"]:
            terms.append(self._repetition(unit, "0,"))
        elif most > least:
            terms.append(self._at_most(unit, most - least))
        return f"{rule['name']} ::= (({' '.join(terms)}))"

    def _exactly(self, unit: str, size: int) -> str:
        if size <= CHUNK:
            return self._repetition(unit, f"{size},{size}")
        chunk = _chunk_within(size - 1)
        count, rest = divmod(size, chunk)
        terms = [f"{self._exactly(unit, chunk)}{{{count}, {count}}}"]
        if rest:
            terms.append(self._exactly(unit, rest))
        return self._rule(f"(({' '.join(terms)}))")

    def _at_most(self, unit: str, size: int) -> str:
        if size < CHUNK:
            return self._repetition(unit, f"0,{size}")
        chunk = _chunk_within(size)
        count, rest = divmod(size, chunk)
        whole, shorter = self._exactly(unit, chunk), self._at_most(unit, chunk - 1)
        last = f" {self._at_most(unit, rest)}" if rest else ""
        fewer = f"({whole}{{0, {count - 1}}} {shorter})" if count > 1 else f"({shorter})"
        return self._rule(f"({fewer} | ({whole}{{{count}, {count}}}{last}))")

    def _repetition(self, unit: str, times: str) -> str:
        return self._rule(f'Regex("^{unit}{{{times}}}$", json_string=true)')

    def _rule(self, body: str) -> str:
        """Returns the name of the rule with this body."""
        if body not in self._name_of:
            numbered = (f"chunk_{number}" for number in itertools.count(1))
            name = next(name for name in numbered if name not in self._names)
            self._names.add(name)
            self._name_of[body] = name
            self.rules.append(f"{name} ::= {body}")
        return self._name_of[body]


def _chunk_within(size: int) -> int:
    """Returns the size of the largest chunk of at most `size` characters."""
    chunk = CHUNK
    while chunk * CHUNKS_IN_NEXT <= size:
        chunk *= CHUNKS_IN_NEXT
    return chunk
