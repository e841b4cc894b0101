"""Character classes, compared with Python's regular expressions. `test_json_schema.py` tests whole expressions."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import xgrammar

from mla_router.worker.grammar.json_pattern import of_text

CLASSES = [
    ".",
    r"\d",
    r"\D",
    r"\w",
    r"\W",
    "[a-f]",
    "[^a-f]",
    '[a"-$]',
    r"[\\\]x-]",
    r"[-\w.]",
    r"[^\W\d_]",
    r"[\x20-\u007e]",
    r"[^\n\t ]",
    r"[\s\S]",
    r"[ -\xe9]",
    "[é-ü^]",
]


@pytest.mark.parametrize("pattern", CLASSES)
def test_a_class_loses_only_escaped_characters(pattern: str) -> None:
    before, after = re.compile(pattern, re.ASCII), re.compile(of_text(pattern))
    # Without U+0085, a space to some
    for character in map(chr, [*range(0x85), *range(0x86, 0x250), 0xFFFF, 0x1F600, 0x10FFFF]):
        is_plain = json.dumps(character, ensure_ascii=False) == f'"{character}"'
        # JSON Schema's expressions are ECMA-262's, whose dot knows one more end of a line
        has = before.fullmatch(character) is not None and not (pattern == "." and character == "\r")
        assert (after.fullmatch(character) is not None) == (has and is_plain), hex(ord(character))


@pytest.mark.parametrize("pattern", [r"[\^]b", r"[\^-a]{2}", r"[\^é]{2}", r"[\^\n]a"])
def test_a_class_that_begins_with_a_caret_is_not_negated(pattern: str) -> None:
    vocabulary = ["</s>", *(bytes([byte]) for byte in range(256))]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[0]))
    grammar = compiler.compile_regex(of_text(pattern))
    for text in map("".join, itertools.product("^_abéx", repeat=2)):
        accepted = xgrammar.GrammarMatcher(grammar).accept_string(text)
        assert accepted == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ('a"b', r"a\"b"),
        (r"(\"x)+", r"\"x\"x"),
        (r"\\{2}", r"\\\\"),
        (r"\x22\u005c\n", r"\"\\\n"),
        ("\t\v", r"\t\u000b"),
        (r"(ab+)?\/c??", "abb/"),
        (r"\.\+\?\[\]é", ".+?[]é"),
    ],
)
def test_single_characters_are_escaped(pattern: str, text: str) -> None:
    assert re.fullmatch(of_text(pattern), text)
    assert re.fullmatch(pattern, json.loads(f'"{text}"'))


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (r"\u{22}", '"'),
        (r"\u{5C}\cJ", "\\\n"),
        (r"\u{1F600}\u{2e}", "\U0001f600."),
        (r"\uD83D\uDE00", "\U0001f600"),
        (r"[\u{61}-\x63\ud83d\ude00]+", "b\U0001f600"),
    ],
)
def test_escapes_that_python_does_not_have(pattern: str, value: str) -> None:
    assert re.fullmatch(of_text(pattern), json.dumps(value, ensure_ascii=False)[1:-1])
    assert not re.fullmatch(of_text(pattern), value + ".")


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)", "x(?!b)", '["]', r"[\n\\]", "[b-a]", r"[\pL]"),
        *(r"\ud83d", r"[\ud800-\udfff]", r"\u{110000}", r"[\u{22}]"),
        *("(?<=a)b", "(?<!a)b", r"\bx", r"(a)\1", r"(?<n>a)\k<n>", r"\p{L}"),
        *("[a", "a\\", "[" * 100_000),
    ],
)
def test_unsupported_syntax_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"not supported|not a range|must not end"):
        of_text(pattern)
