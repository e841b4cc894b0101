"""Answers of models and their parts, for tests of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import xgrammar

from mla_router.worker.server.text.tool_calls.parts import Arguments, Call, Content, Part, Reasoning

TEMPLATES = Path(__file__).resolve().with_name("chat_templates")


class Parser(Protocol):
    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]: ...


@dataclass
class Found:
    """Returns all parts of an answer."""

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


def accepts(tag: Any) -> Callable[[str], bool]:
    """Returns whether a text is a complete sentence of the grammar, by xgrammar with a vocabulary of bytes."""
    vocabulary = ["</s>", *(bytes([byte]) for byte in range(256))]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[0])
    text = json.dumps(tag) if isinstance(tag, dict) else tag
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(text)

    def accept(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return bool(matcher.accept_string(text) and matcher.accept_token(0))

    return accept
