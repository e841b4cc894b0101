r"""Rewrites the regular expressions of a schema, so that xgrammar's strings are valid JSON.

A `pattern` of a schema restricts the value of a string, but a grammar restricts its JSON text. xgrammar does not
always distinguish the two: in expressions with a quote, a backslash or a letter beyond ASCII it allows characters that
JSON must escape. So this module writes such a character in escaped form if it stands alone, and removes it from
character classes. The result may exclude valid strings, but it allows no invalid ones.

xgrammar also reads `(ab+)?` as `(a?b+)?`, but reads `(ab+){0,1}` correctly. It ignores lookaheads, so they are refused.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise

from mla_router.worker.grammar.regex_syntax import UNKNOWN, check_syntax

Ranges = list[tuple[int, int]]  # inclusive ranges of code points, sorted and disjoint

_LAST = 0x10FFFF
_CARET = ord("^")
_UNSAFE: Ranges = [(0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))]
# The classes of ECMA-262, which JSON Schema uses.
_DIGITS: Ranges = [(ord("0"), ord("9"))]
_WORD: Ranges = [
    (ord("0"), ord("9")),
    (ord("A"), ord("Z")),
    (ord("_"), ord("_")),
    (ord("a"), ord("z")),
]
_SPACE: Ranges = [
    (9, 13),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
]
_SPACE_TO_SOME: Ranges = [(0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}

# An escape of ECMA-262. Two surrogates are one character, as in its Unicode mode.
ESCAPE = (
    r"\\(?:x[0-9a-fA-F]{2}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c[a-zA-Z]|.)"
)
# Second characters of the escapes that xgrammar does not support: boundaries, back-references, properties of characters
UNSUPPORTED = UNKNOWN | frozenset("bBkpP123456789")
# A character class, an escape, a quantifier with its suffix, or the opening of a group or of a lookaround.
_TOKEN = re.compile(rf"\[(?:[^\]\\]|\\.)*\]|{ESCAPE}|\(\?(?:<?[=!])?|[*+?}}]\??|.", re.DOTALL)
_MEMBER = re.compile(rf"{ESCAPE}|.", re.DOTALL)


def of_text(pattern: str) -> str:
    """Returns an expression of the JSON text between the quotes. Raises ValueError for unsupported syntax."""
    check_syntax(pattern)
    # Token by token: after a `[` that is not closed, each further one is compared with the whole rest
    return "".join(_rewritten(token[0]) for token in _TOKEN.finditer(pattern))


def _rewritten(token: str) -> str:
    """Returns the expression that replaces a token of a pattern. Raises ValueError."""
    if token in ("?", "??"):
        return "{0,1}"
    if token in ("(?=", "(?!", "(?<=", "(?<!"):
        kind = "lookbehinds" if "<" in token else "lookaheads"
        raise ValueError(f"{kind} are not supported in a pattern")
    if token in ("[", "\\"):
        raise ValueError(f"a pattern must not end within `{token}`")
    if token[0] == "\\" and token[1] in UNSUPPORTED:
        raise ValueError(f"`{token}` is not supported in a pattern")
    if token == ".":
        return _class_of(_complement(_LINE_ENDS))
    if token[0] == "[":
        return _class_of(_ranges_in(token))
    if (named := _NAMED.get(token)) is not None:
        return _class_of(named)
    character = _character(token)
    if len(character) > 1:
        return token
    escaped = json.dumps(character, ensure_ascii=False)[1:-1]
    if escaped == character:
        is_code = len(token) > 2
        return _range_text((ord(character), ord(character))) if is_code else token
    return "(?:" + escaped.replace("\\", r"\\") + ")"


def _character(token: str) -> str:
    """Returns the character that a token stands for; the token itself if it is not a single character. Raises
    ValueError for the code of no character."""
    if len(token) < 2 or token[0] != "\\":
        return token
    if token[1] in "xuc" and len(token) > 2:
        code = _code(token)
        if code > _LAST or 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"`{token}` is not supported: no character has this code")
        return chr(code)
    if token[1].isalnum():
        return _CONTROLS.get(token[1], token)
    return token[1]


def _code(escape: str) -> int:
    """Returns the code point of an escape such as `\\x41`, `\\u{41}` or `\\cA`."""
    if escape[1] == "c":
        return ord(escape[2]) % 32
    first, *second = (
        int(digits.strip("{}"), base=16) for digits in re.split(r"\\[xu]", escape)[1:]
    )
    return 0x10000 + ((first - 0xD800) << 10) + second[0] - 0xDC00 if second else first


def _ranges_in(token: str) -> Ranges:
    """Returns the ranges of a class in brackets. Raises ValueError."""
    inside, ranges = token[1:-1].removeprefix("^"), Ranges()
    members = _MEMBER.findall(inside)[::-1]  # the next one is the last
    while members:
        first = members.pop()
        if (named := _NAMED.get(first)) is not None:
            ranges += named
            continue
        low = high = _code_point(first)
        if len(members) > 1 and members[-1] == "-" and members[-2] not in _NAMED:
            _, last = members.pop(), members.pop()
            high = _code_point(last)
            if high < low:
                raise ValueError(f"`{first}-{last}` is not a range of characters")
        ranges.append((low, high))
    ranges = _united(ranges)
    return _complement(ranges) if token[1] == "^" else ranges


def _code_point(member: str) -> int:
    character = "\b" if member == r"\b" else _character(member)
    if len(character) > 1:
        raise ValueError(f"`{member}` is not supported in a class of characters")
    return ord(character)


def _united(ranges: Ranges) -> Ranges:
    united = Ranges()
    for low, high in sorted(ranges):
        if united and low <= united[-1][1] + 1:
            united[-1] = united[-1][0], max(united[-1][1], high)
        else:
            united.append((low, high))
    return united


def _complement(ranges: Ranges) -> Ranges:
    edges = [(-1, -1), *ranges, (_LAST + 1, _LAST + 1)]
    gaps = [(before[1] + 1, after[0] - 1) for before, after in pairwise(edges)]
    return [(low, high) for low, high in gaps if low <= high]


def _class_of(ranges: Ranges) -> str:
    """Returns a character class of `ranges`, without the characters that JSON must escape."""
    others = _united([*_complement(ranges), *_UNSAFE])
    safe = _complement(others)
    if not safe:
        raise ValueError("a class of characters that JSON must escape is not supported")
    # A class that reaches the last code point is written negated: its text then stays within ASCII.
    if safe[-1][1] == _LAST:
        return "[^" + "".join(map(_range_text, others)) + "]"
    # At the beginning of a class xgrammar reads even the code of a caret as a negation.
    if safe[0][0] == _CARET:
        rest = [(max(low, _CARET + 1), high) for low, high in safe if high > _CARET]
        return (
            "[" + "".join(map(_range_text, rest)) + _range_text((_CARET, _CARET)) + "]"
            if rest
            else r"\^"
        )
    return "[" + "".join(map(_range_text, safe)) + "]"


def _range_text(ends: tuple[int, int]) -> str:
    low, high = (chr(at) if at > 0xFFFF else f"\\u{at:04x}" for at in ends)
    return low if low == high else f"{low}-{high}"


_NAMED: dict[str, Ranges] = {
    r"\d": _DIGITS,
    r"\D": _complement(_DIGITS),
    r"\w": _WORD,
    r"\W": _complement(_WORD),
    r"\s": _SPACE,
    r"\S": _complement(_united(_SPACE + _SPACE_TO_SOME)),
}
