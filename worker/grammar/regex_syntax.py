r"""Refuses or rewrites regular expressions that xgrammar reads in another way than regular expressions are read.

It ignores `^` and `$` within an expression, so that `a^b` would allow `ab`, and reads an escape that it does not know,
such as `\A` or `\Z`, as the letter itself. An expression has to match a whole text, so that `^` at its beginning and `$`
at its end have no effect. Its `.` matches ends of lines.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from itertools import chain

# Second characters of the escapes that xgrammar reads as ECMA-262, or refuses by itself
_KNOWN = frozenset("bBcdDfknpPrsStuvwWx0123456789")
UNKNOWN = frozenset(string.ascii_letters) - _KNOWN
# A character class (one that is not closed ends with the text), an escape, the opening of a group, or any other character
_TOKEN = re.compile(r"\[(?:[^\]\\]|\\.)*\]?|\\.|\((?:\?(?:[:=!]|<[=!]|P?<\w+>))?|.", re.DOTALL)
# Escapes: xgrammar reads `\xe9a` as one letter, and within a class `\u00e9a` as well, whose letter it writes as `\xe9`
_CODE = re.compile(r"\\(?:(?P<joined>x[0-9A-Fa-f]{3})|.)", re.DOTALL)
_CODE_IN_CLASS = re.compile(
    r"\\(?:(?P<joined>(?:x|u00)(?:[0189A-Fa-f][0-9A-Fa-f]|7[Ff])"
    r"(?:[0-9A-Fa-f]|\\(?:x|u00)(?:3[0-9]|[46][1-6])))|.)",
    re.DOTALL,
)
# A class that xgrammar reads as that of all other characters
_ESCAPED_CARET = re.compile(r"\[\\(?:\^|x5e|u005e|u\{0*5e\})", re.IGNORECASE)
_NO_LINE_END = r"[^\n\r\u2028\u2029]"  # `.` of ECMA-262


def prepare(pattern: str) -> str:
    """Returns an expression for xgrammar. Raises ValueError as `check_syntax`, and for codes and classes that only
    `json_pattern` rewrites, in the pattern of a schema."""
    check_syntax(pattern)
    tokens = [token[0] for token in _TOKEN.finditer(pattern)]
    classes = [token for token in tokens if token[0] == "["]
    codes = [*_CODE.finditer(pattern), *chain(*map(_CODE_IN_CLASS.finditer, classes))]
    if any(code["joined"] for code in codes):
        raise ValueError(
            "the code of a letter is not supported before 0-9 or a-f; write the letter"
        )
    if any(_ESCAPED_CARET.match(inside) for inside in classes):
        raise ValueError("an escaped `^` is not supported at the beginning of a class")
    return "".join(_NO_LINE_END if token == "." else token for token in tokens)


def check_syntax(pattern: str) -> None:
    """Raises ValueError with the reason for which `pattern` would be misread."""
    tokens = [token[0] for token in _TOKEN.finditer(pattern)]
    for token in tokens:
        if token[0] == "\\" and token[1:] in UNKNOWN:
            raise ValueError(f"`{token}` is not supported in a pattern")
    repeated = _repeated_groups(tokens)
    _check_anchor(tokens, "^", "()", "beginning", repeated)
    backwards = {len(tokens) - 1 - at for at in repeated}
    _check_anchor(tokens[::-1], "$", ")(", "end", backwards)


def _repeated_groups(tokens: Sequence[str]) -> set[int]:
    """Returns the positions of the brackets of groups that may match several times."""
    repeated, opened = set[int](), list[int]()
    for at, token in enumerate(tokens):
        if token[0] == "(":
            opened.append(at)
        elif token == ")" and opened:
            first = opened.pop()
            if "".join(tokens[at + 1 : at + 2]) in ("*", "+", "{"):
                repeated |= {first, at}
    return repeated


def _check_anchor(
    tokens: Sequence[str], anchor: str, brackets: str, place: str, repeated: set[int]
) -> None:
    """Raises ValueError if `anchor` stands after a token that matches text, or in a group of `repeated`. `tokens` are in the
    order in which `brackets` open and close a group: backwards for an anchor of the end."""
    is_bare = True  # no text comes before the token
    outer = list[bool]()  # the same for each open group
    for at, token in enumerate(tokens):
        if token == anchor and not is_bare:
            raise ValueError(f"`{anchor}` is supported only at the {place} of a pattern")
        if token[0] == brackets[0]:
            is_bare = is_bare and at not in repeated
            outer.append(is_bare)
        elif token[0] == brackets[1]:
            is_bare = False
            del outer[-1:]
        elif token == "|":
            is_bare = outer[-1] if outer else True
        elif token not in ("^", "$"):
            is_bare = False
