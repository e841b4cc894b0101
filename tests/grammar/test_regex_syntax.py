"""Anchors and escapes: refused where xgrammar would misread them."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import product

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.grammar.regex_syntax import check_syntax, prepare


@pytest.mark.parametrize(
    "pattern",
    [
        *("^a$", "a", "", "^", "^^a$$", "^a$|^b$", "(^a|b)c", "a(b$|c)", "((^a)b|(?:^c))d"),
        *(r"(^|\s)a($|\s)", "(?P<name>^a)b", "(?<name>^a)b", r"a\^b\$c", "[a^$]b[^$]c"),
        *(r"[\]^]a", r"\d\D\s\S\w\W\b\t\n\x41\u0041\.\-\1", "a(b", "a)b", "a[^", "a\\"),
        "[" * 100_000,
    ],
)
def test_anchors_without_effect_are_allowed(pattern: str) -> None:
    check_syntax(pattern)


TEXTS = ["".join(letters) for size in range(5) for letters in product("ab", repeat=size)]


PATTERNS = st.recursive(
    st.sampled_from(["a", "b+", "^", "$", "a?"]),
    lambda inner: (
        st.lists(inner, max_size=4).map("".join)
        | st.tuples(inner, inner).map("({0[0]}|{0[1]})".format)
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", ""])).map(
            "(?:{0[0]}){0[1]}".format
        )
    ),
)


@given(PATTERNS)
def test_anchors_of_an_allowed_pattern_have_no_effect(pattern: str) -> None:
    """Compared with Python's expressions, which heed the anchors."""
    with suppress(ValueError):
        check_syntax(pattern)
        heeding, ignoring = re.compile(pattern), re.compile(re.sub("[$^]", "", pattern))
        for text in TEXTS:
            assert bool(heeding.fullmatch(text)) == bool(ignoring.fullmatch(text)), text


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "a^b",
            "a$b",
            "a(^b)",
            "(a$)b",
            "(a|b)^c",
            "(a|b$)c",
            "x(a|^b)",
            "(a$|b)x",
            "[a]^",
            "$[a]",
        ),
        *("a+^b", "a$+", "(a$)*", "(^a)+b", r"\d^", r"$\d", "a(?:b|^c)", "((a$))b"),
    ],
)
def test_anchors_within_a_pattern_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"is supported only at the (beginning|end) of a pattern"):
        check_syntax(pattern)


@pytest.mark.parametrize("letter", "AZzGQEaeg")
def test_an_unknown_escape_is_refused(letter: str) -> None:
    with pytest.raises(ValueError, match=rf"`\\{letter}` is not supported in a pattern"):
        check_syntax(rf"a\{letter}")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        *((pattern, "code of a letter") for pattern in (r"\xe9a", r"[\x5ea]", r"[\u00e9\x46]")),
        *((pattern, "escaped `\\^`") for pattern in (r"[\^a]", r"[\u005e]", r"a[\x5e-z]")),
    ],
)
def test_codes_and_carets_that_would_be_misread_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        prepare(pattern)


BYTES = xgrammar.TokenizerInfo(
    ["</s>", *(bytes([byte]) for byte in range(256))], stop_token_ids=[0]
)
LETTERS = 'abe9éü^-][\\中. "F\n'
SPELLINGS = st.tuples(
    st.sampled_from(LETTERS),
    st.sampled_from([re.escape, lambda c: f"\\u{ord(c):04x}", lambda c: f"\\x{ord(c) % 256:02x}"]),
).map(lambda spelt: spelt[1](spelt[0]))
CLASSES = st.tuples(st.sampled_from(["", "^"]), st.lists(SPELLINGS, min_size=1, max_size=4)).map(
    lambda parts: f"[{parts[0]}{''.join(parts[1])}]"
)


@given(
    st.lists(SPELLINGS | CLASSES | st.just("."), min_size=1, max_size=3).map("".join),
    st.lists(st.text(LETTERS, max_size=3), max_size=10),
)
def test_an_allowed_pattern_is_read_as_by_python(pattern: str, texts: list[str]) -> None:
    with suppress(ValueError):
        prepared = prepare(pattern)
        grammar = xgrammar.GrammarCompiler(BYTES).compile_regex(prepared)
        for text in texts:
            matcher = xgrammar.GrammarMatcher(grammar)
            accepted = matcher.accept_string(text) and matcher.accept_token(0)
            assert bool(accepted) == bool(re.fullmatch(pattern, text)), text
