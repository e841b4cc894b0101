"""What a worker's settings say about all its grammars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    any_whitespace: bool = True  # in JSON; or else only a blank behind each comma and colon
    jump_forward: bool = True  # say which tokens must come next, where that is certain
    tokenizer_folder: Path | None = None  # None: the model's folder
