"""Formats, compared with Python's parsers, and as JSON."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
from collections.abc import Callable
from itertools import product

import pytest
import xgrammar

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.grammar.schema.formats import PATTERNS
from mla_router.worker.grammar.vocabulary import read_vocabulary
from mla_router.worker.grammar.xgrammar_backend import Compiler
from mla_router.worker.messages import Grammar


def _is(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def test_dates_are_those_of_the_calendar() -> None:
    years = (1, 4, 96, 100, 400, 1900, 1904, 1996, 2000, 2023, 2024, 2100, 9996, 9999)
    for year, month, day in product(years, range(14), range(33)):
        text = f"{year:04d}-{month:02d}-{day:02d}"
        expected = _is(datetime.date.fromisoformat, text)
        assert bool(re.fullmatch(PATTERNS["date"], text)) == expected, text


def test_times_are_those_of_a_day() -> None:
    parts = product(
        ("00", "19", "23", "24"), ("59", "60"), ("59", "60"), ("", ".5"), ("Z", "+23:59")
    )
    for hour, minute, second, fraction, zone in parts:
        text = f"{hour}:{minute}:{second}{fraction}{zone}"
        expected = _is(datetime.time.fromisoformat, text)
        assert bool(re.fullmatch(PATTERNS["time"], text)) == expected, text


def test_addresses_have_four_octets() -> None:
    octets = ("", *map(str, range(301)), "00", "01", "010", "0255", "1000")
    for octet in octets:
        for text in (f"{octet}.2.3.4", f"1.2.3.{octet}", f"1.{octet}.4"):
            expected = _is(ipaddress.IPv4Address, text)
            assert bool(re.fullmatch(PATTERNS["ipv4"], text)) == expected, text


@pytest.mark.parametrize(
    ("named", "allowed", "forbidden"),
    [
        ("date", ["2024-02-29"], ["2023-02-29", "2024-04-31"]),
        ("time", ["23:59:59Z"], ["23:59:60Z"]),
        ("date-time", ["2024-12-31T23:59:59.25+01:00"], ["2024-02-30T00:00:00Z"]),
        ("ipv4", ["10.0.255.1"], ["10.0.256.1", "010.0.0.1"]),
        ("email", ["a.b+c@d-e.org", "a@b"], [r"\"\q\"@a.org", "a@b-", "a@@b", ".a@b", "a"]),
        ("json-pointer", ["", "/a b/~0é~1/0", "/", "/☃"], ['/"', "/\n", "/~2", r"/\q", "a"]),
        ("relative-json-pointer", ["0#", "12/a", "1"], ['1/"', "01", "/a", "1##"]),
    ],
)
def test_texts_of_a_format_are_json(named: str, allowed: list[str], forbidden: list[str]) -> None:
    schema = {"type": "string", "format": named}
    compiled = Compiler(read_vocabulary(SMALL_MODEL, 1024)).compile(
        Grammar("json_schema", json.dumps(schema))
    )

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return matcher.accept_string(f'"{text}"') and matcher.is_completed()

    assert [text for text in allowed if not accepts(text)] == []
    assert [text for text in forbidden if accepts(text)] == []
