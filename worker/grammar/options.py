"""The settings of all grammars of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    any_whitespace: bool = True  # in JSON; False: only one blank after each comma and colon
    jump_forward: bool = True  # append forced tokens without the model
    tokenizer_folder: Path | None = None  # None: the model's folder
