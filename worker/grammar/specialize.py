r"""Rewrites the grammar of a JSON schema, so that the text after a string is known at compilation.

xgrammar precomputes the tokens that a rule allows in each state, except tokens that continue after the end of the rule,
as `",` does in a string. It matches these byte by byte in every mask. It can avoid this if the rule has only one
reference, which is not the end of a sequence: the text after it is the *exact lookahead*. In xgrammar's grammar of a
schema all strings are one rule, and most other rules are the end of a sequence:

    root ::= (("[" basic_string root_items{0, -1} "]"))
    root_items ::= (("," basic_string))

So each string becomes a rule of its own, and the text after a rule moves into the rule:

    root ::= ("[" string_1 root_items_next)
    root_items ::= ("," string_2 root_items_next)
    root_items_next ::= ("]") | (root_items)

Both steps preserve the language, and so all masks.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator

Sequence = tuple[str, ...]  # terms in xgrammar's notation

_TERM = re.compile(
    r"""
      Regex\("(?:\\.|[^"\\])*"(?:,\ \w+=\w+)*\)
    | "(?:\\.|[^"\\])+"
    | \[(?:\\.|[^\]\\])*\]\*?
    | \w+(?:\{\d+,\ -?\d+\})?
    """,
    re.VERBOSE,
)
_SEQUENCE = re.compile(rf'""|\((?:{_TERM.pattern})(?:[ ](?:{_TERM.pattern}))*\)', re.VERBOSE)
_BODY = re.compile(rf"\((?:{_SEQUENCE.pattern})(?:[ ]\|[ ](?:{_SEQUENCE.pattern}))*\)", re.VERBOSE)

STRING = "basic_string"
# The definition of a string, and the same as one automaton, which needs no stack. The classes are split by the length
# of the UTF-8 codes: for a class of several lengths xgrammar makes an automaton that accepts longer codes, too.
_DEFINITIONS = (
    'basic_string ::= (("\\"" basic_string_sub))',
    r'basic_string_sub ::= (("\"") | ([^\0-\x1f\"\\\r\n] basic_string_sub) | ("\\" basic_escape basic_string_sub))',
    r'basic_escape ::= (([\"\\/bfnrt]) | ("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]))',
)
_AUTOMATON = (
    r'Regex("\"([\\x20-\\x21\\x23-\\x5b\\x5d-\\x7f]|[\\u0080-\\u07ff]|[\\u0800-\\uffff]|[\\u{10000}-\\u{10ffff}]'
    r'|\\\\([\"\\\\/bfnrt]|u[A-Fa-f0-9]{4}))*\"")'
)

# Each rule of a string takes 0.1 MB of masks, and up to 40 ms to compile before 100 optional properties.
MAX_STRINGS = 64


def specialize(ebnf: str) -> str:
    """Returns a grammar with the same language as `ebnf`, which `xgrammar.Grammar.from_json_schema` has written."""
    if not all(definition in ebnf for definition in _DEFINITIONS):
        return ebnf
    grammar = _Grammar(ebnf)
    for name in grammar.top_down():
        grammar.move_in(name)
    return "\n".join(grammar.written())


class _Grammar:
    def __init__(self, ebnf: str) -> None:
        self.rules: dict[str, list[Sequence]] = {}  # the alternatives of each rule
        self.others: list[str] = []  # unchanged lines
        for line in ebnf.strip().split("\n"):
            name, _, body = line.partition(" ::= ")
            # The rules of arbitrary JSON have references everywhere.
            if name.startswith("basic_") or not _BODY.fullmatch(body):
                self.others.append(line)
            else:
                sequences = _SEQUENCE.findall(body[1:-1])
                self.rules[name] = [tuple(_TERM.findall(sequence)) for sequence in sequences]
        self._fixed = {"root", *re.findall(r"\w+", "\n".join(self.others))}
        self._names = set(re.findall(r"\w+", ebnf))
        # Rules that refer or referred to a rule
        self._users: dict[str, set[str]] = defaultdict(set)
        for name in self.rules:
            self._note(name)

    def top_down(self) -> list[str]:
        """Returns the rules, each after the rules that refer to it, except in recursion."""
        bottom_up: list[str] = []
        seen: set[str] = set()
        stack = [("root", False)]
        while stack:
            name, is_done = stack.pop()
            if is_done:
                bottom_up.append(name)
            elif name in self.rules and name not in seen:
                seen.add(name)
                stack.append((name, True))
                stack += [(_rule(term), False) for one in self.rules[name] for term in one]
        return bottom_up[::-1]

    def move_in(self, name: str) -> None:
        """Moves the text after a rule into the rule, if it is the same after all references."""
        places = [
            (user, index, at)
            for user in self._users[name]
            for index, sequence in enumerate(self.rules[user])
            for at, term in enumerate(sequence)
            if _rule(term) == name
        ]
        tails = {self.rules[user][index][at:] for user, index, at in places}
        if len(tails) != 1 or name in self._fixed or name in (user for user, _, _ in places):
            return
        term, *rest = tails.pop()
        if not rest:
            return
        if term == name:
            first = name
            following = rest[0] if len(rest) == 1 else self._add(f"{name}_next", [tuple(rest)])
        elif term in (f"{name}{{0, -1}}", f"{name}{{1, -1}}") and self._has_text(name):
            following = self._add(f"{name}_next", [tuple(rest), (name,)])
            first = following if term == f"{name}{{0, -1}}" else name
        else:
            return
        for user, index, at in places:
            self.rules[user][index] = (*self.rules[user][index][:at], first)
            self._note(user)
        self.rules[name] = [(*sequence, following) for sequence in self.rules[name]]
        self._note(name)

    def written(self) -> Iterator[str]:
        """Yields the lines. Strings within a sequence get rules of their own."""
        yield from self.others
        num_strings = 0
        for name, sequences in self.rules.items():
            alternatives = []
            for sequence in sequences:
                terms = list(sequence)
                for at, term in enumerate(sequence[:-1]):
                    if term == STRING and num_strings < MAX_STRINGS:
                        num_strings += 1
                        terms[at] = self._new_name("string")
                        yield f"{terms[at]} ::= {_AUTOMATON}"
                alternatives.append(f"({' '.join(terms)})" if terms else '""')
            yield f"{name} ::= {' | '.join(alternatives)}"

    def _add(self, stem: str, sequences: list[Sequence]) -> str:
        name = self._new_name(stem)
        self.rules[name] = sequences
        self._note(name)
        return name

    def _new_name(self, stem: str) -> str:
        numbered = (f"{stem}_{number}" for number in itertools.count(1))
        name = next(name for name in numbered if name not in self._names)
        self._names.add(name)
        return name

    def _note(self, user: str) -> None:
        for sequence in self.rules[user]:
            for term in sequence:
                self._users[_rule(term)].add(user)

    def _has_text(self, name: str) -> bool:
        """Returns whether the rule never matches the empty text, so that a repetition of it ends."""
        return all(any(t.startswith('"') for t in sequence) for sequence in self.rules[name])


def _rule(term: str) -> str:
    """Returns the name of the rule to which `term` refers."""
    return term.partition("{")[0]
