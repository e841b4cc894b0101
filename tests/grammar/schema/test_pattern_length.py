"""Patterns beside lengths, compared with Python's expressions on all short strings."""

from __future__ import annotations

import itertools
import re

import pytest

from mla_router.worker.grammar.schema.pattern_length import bounded
from mla_router.worker.grammar.schema.values import Inexact

LONGEST = 7
TEXTS = [
    "".join(letters) for n in range(LONGEST + 1) for letters in itertools.product("ab", repeat=n)
]


@pytest.mark.parametrize(
    "pattern",
    [
        *("^a*$", "^a+$", "^ba?$", "^a{2}b*$", "^a{1,}b$", "^[ab]{2,5}$", "^[^b]+b$", "^.*$"),
        *("^(ab)*$", "^b(?:ab)+$", "^(aa|bb){1,3}$", "^(a|b)+b$", "^a+?$", "^\\x61{0,4}b$"),
        *("^\\w+$", "^a(b|b)*$", "^(a){2,3}b$", "[ab]*b"),
    ],
)
def test_matches_are_those_of_a_length(pattern: str) -> None:
    changed = 0
    for least, most in itertools.product(range(6), (*range(6), None)):
        expected = [
            text
            for text in TEXTS
            if re.fullmatch(pattern, text)
            and least <= len(text)
            and (most is None or len(text) <= most)
        ]
        try:
            within = bounded(pattern, least, most)
        except Inexact as error:
            assert not expected, f"{least} to {most}: {error}"
            continue
        assert [text for text in TEXTS if re.fullmatch(within, text)] == expected, (least, most)
        changed += within != pattern
    assert changed > 5


@pytest.mark.parametrize("pattern", ["^a*b*$", "^(a*)$", "^(a|bb)$", "a|bb", "^(a|bb)+$"])
def test_a_pattern_stays_if_its_matches_are_within(pattern: str) -> None:
    assert bounded(pattern, 0, None) == pattern
    with pytest.raises(Inexact, match="say the length in the pattern"):
        bounded(pattern, 2, 2)


def test_alternatives_have_the_lengths_of_all() -> None:
    assert bounded("^a$|bb", 1, 2) == "^a$|bb"
    assert bounded("aa|b|(aaa)", 1, 3) == "aa|b|(aaa)"
    for least, most in ((2, 3), (1, 2)):
        with pytest.raises(Inexact, match="say the length"):
            bounded("aa|b|(aaa)", least, most)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("^(a$", "`\\(` that is not closed"),
        ("(a|b", "`\\(` that is not closed"),
        ("^a)$", "`\\)` that closes nothing"),
        ("*a", "repeats nothing"),
        ("a**", "repeats nothing"),
        ("(+a)", "repeats nothing"),
        ("^(?=a)a*$", "not supported together with lengths"),
        ("^(?!a)b*$", "not supported together with lengths"),
        (r"^(a)\1*$", "not supported together with lengths"),
        (r"^a*\b$", "not supported together with lengths"),
        (r"\p{L}*", "not supported together with lengths"),
        ("a{,3}", "not supported together with lengths"),
        ("a]", "not supported together with lengths"),
    ],
)
def test_refusals_give_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(Inexact, match=reason):
        bounded(pattern, 1, 3)


def test_an_escape_is_one_character() -> None:
    assert bounded(r"^\u{61}\cJ*$", 3, 5) == r"^\u{61}\cJ{2,4}$"
    assert bounded(r"^\ud83d\ude00+$", 2, 2) == r"^\ud83d\ude00{2,2}$"
