"""Answers as models write them, and what is in them, for tests of the parsers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mla_router.worker.server.tool_calls.parts import Arguments, Call, Content, Part, Reasoning

TEMPLATES = Path(__file__).resolve().with_name("chat_templates")


class Parser(Protocol):
    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]: ...


@dataclass
class Found:
    """All parts of an answer together."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, Reasoning):
                self.reasoning += part.text
            elif isinstance(part, Content):
                self.content += part.text
            elif isinstance(part, Call):
                self.calls.append((part.name, ""))
            elif isinstance(part, Arguments):
                name, arguments = self.calls[-1]
                self.calls[-1] = (name, arguments + part.text)


def parse(parser: Parser, pieces: Iterable[str]) -> Found:
    found = Found()
    for piece in pieces:
        found.add(parser.push(piece))
    found.add(parser.finish())
    return found


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
