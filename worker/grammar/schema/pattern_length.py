"""Restricts a pattern to matches whose length is within bounds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mla_router.worker.grammar.json_pattern import ESCAPE, UNSUPPORTED
from mla_router.worker.grammar.schema.values import Inexact

_TOKEN = re.compile(
    r"""
      (?P<set>\[\^?(?:[^\]\\]|\\.)*\])
    | (?P<escape>"""
    + ESCAPE
    + r""")
    | (?P<times>(?:[*+?]|\{(?P<least>\d+)(?P<comma>,(?P<most>\d*))?\})\??)
    | (?P<open>\((?:\?:)?(?!\?))
    | (?P<close>\))
    | (?P<or>\|)
    | (?P<anchor>[\^$])
    | (?P<one>[^()*+?{}\[\]])
    """,
    re.VERBOSE | re.DOTALL,
)
_TIMES = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}


@dataclass(slots=True)
class _Item:
    """A part of a pattern. It has `shortest` to `longest` characters and is repeated `least` to `most` times."""

    text: str
    shortest: float
    longest: float
    least: float = 1
    most: float = 1
    times: str = ""  # the text of the quantifier

    @property
    def lengths(self) -> tuple[float, float]:
        return self.shortest * self.least, self.longest * self.most if self.longest else 0


def bounded(pattern: str, least: int, most: int | None) -> str:
    """Returns a pattern of the matches with `least` to `most` characters. Raises Inexact."""
    longest = math.inf if most is None else most
    items, end = _sequence(pattern, 0)
    if end < len(pattern):  # alternatives stay unchanged
        low, high, end = _alternatives(pattern, 0)
        if end < len(pattern):
            raise Inexact("`pattern` has a `)` that closes nothing")
        items = [_Item(pattern, low, high)]
    low, high = _lengths(items)
    if least <= low and high <= longest:
        return pattern
    variable = [item for item in items if item.lengths[0] != item.lengths[1]]
    if (
        len(variable) != 1
        or variable[0].shortest != variable[0].longest
        or high < least
        or low > longest
    ):
        raise Inexact(
            "`pattern` is not supported together with `minLength` or `maxLength` here: say the length in the "
            "pattern, as in `^[a-z]{1,8}$`"
        )
    item = variable[0]
    fixed, width = low - item.lengths[0], item.shortest
    item.least = max(item.least, math.ceil((least - fixed) / width))
    item.most = min(item.most, (longest - fixed) // width)
    if item.least > item.most:
        raise Inexact("`pattern` matches no string of a length within `minLength` and `maxLength`")
    upper = "" if math.isinf(item.most) else int(item.most)
    item.times = f"{{{int(item.least)},{upper}}}"
    return "".join(part.text + part.times for part in items)


def _lengths(items: list[_Item]) -> tuple[float, float]:
    return sum(item.lengths[0] for item in items), sum(item.lengths[1] for item in items)


def _alternatives(pattern: str, at: int) -> tuple[float, float, int]:
    """Returns the least and the greatest length of an expression, and the position of its end."""
    lows, highs = [], []
    while True:
        items, at = _sequence(pattern, at)
        low, high = _lengths(items)
        lows.append(low)
        highs.append(high)
        if at == len(pattern) or pattern[at] != "|":
            return min(lows), max(highs), at
        at += 1


def _sequence(pattern: str, at: int) -> tuple[list[_Item], int]:
    """Returns the items up to the end, a `|` or an unmatched `)`, and the position of that."""
    items: list[_Item] = []
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        kind = found and found.lastgroup
        if found is None or (kind == "escape" and found[0][1] in UNSUPPORTED):
            raise Inexact(f"`pattern` is not supported together with lengths: `{pattern[at:]}`")
        if kind in ("close", "or"):
            break
        if kind == "open":
            low, high, end = _alternatives(pattern, found.end())
            if end == len(pattern):
                raise Inexact("`pattern` has a `(` that is not closed")
            items.append(_Item(pattern[at : end + 1], low, high))
            at = end + 1
            continue
        if found["times"]:
            if not items or items[-1].times:
                raise Inexact("`pattern` repeats nothing")
            items[-1].times = found[0]
            items[-1].least, items[-1].most = _times(found)
        else:
            width = 0 if kind == "anchor" else 1
            items.append(_Item(found[0], width, width))
        at = found.end()
    return items, at


def _times(found: re.Match[str]) -> tuple[float, float]:
    if found["least"] is None:
        return _TIMES[found[0][0]]
    least = int(found["least"])
    if found["comma"] is None:
        return least, least
    return least, int(found["most"]) if found["most"] else math.inf
