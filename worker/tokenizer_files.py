"""Properties of a model folder's tokenizer, and the file of --chat-template, which several processes need."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mla_router.worker.bounded_file import read_bounded


class MalformedError(ValueError):
    """A file of a model folder, or of --chat-template, is malformed. The message names it."""


def read_chat_template(path: Path) -> str:
    """Returns the text of --chat-template. Raises MalformedError."""
    try:
        return read_bounded(path).decode()
    except OSError as error:
        raise MalformedError(
            f"--chat-template {path}: {error.strerror}; give a file in Jinja"
        ) from error
    except ValueError as error:
        raise MalformedError(f"--chat-template {path}: not UTF-8: {error}") from error


def read_eos_ids(folder: Path, of_tokenizer: int | None) -> frozenset[int]:
    """Returns all EOS tokens. The three files of a folder often name different ones, some of them outside the model's
    vocabulary. `of_tokenizer` is the tokenizer's own. Raises MalformedError."""
    ids = set() if of_tokenizer is None else {of_tokenizer}
    vocab_size = math.inf
    for name in ("config.json", "generation_config.json"):
        settings = _fields(folder / name)
        listed = settings.get("eos_token_id")
        tokens = listed if isinstance(listed, list) else [] if listed is None else [listed]
        if not all(isinstance(token, int) for token in tokens):
            raise MalformedError(
                f"{folder / name}: eos_token_id {listed!r} is not a token id or a list of them"
            )
        size = settings.get("vocab_size")
        if not isinstance(size, int | None):
            raise MalformedError(f"{folder / name}: vocab_size {size!r} is not an integer")
        ids.update(tokens)
        vocab_size = min(vocab_size, math.inf if size is None else size)
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def _fields(path: Path) -> dict[str, Any]:
    """Returns the fields of a JSON file; none if it does not exist. Raises MalformedError."""
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{path}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedError(f"{path}: not a JSON object")
    return fields


def byte_level_alphabet() -> dict[str, int]:
    """Returns the byte of each character of byte-level BPE: printable bytes of Latin-1 stand for themselves, the
    others are the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + at): byte for at, byte in enumerate(others)}
