"""Properties of a model folder's tokenizer that both the server and the grammars need."""

from __future__ import annotations

import json
import math
from pathlib import Path


def read_eos_ids(folder: Path, of_tokenizer: int | None) -> frozenset[int]:
    """Returns all EOS tokens. The three files of a folder often name different ones, some of them outside the model's
    vocabulary. `of_tokenizer` is the tokenizer's own."""
    ids = set() if of_tokenizer is None else {of_tokenizer}
    vocab_size = math.inf
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.is_file():
            settings = json.loads(path.read_text(encoding="utf-8"))
            listed = settings.get("eos_token_id")
            ids.update([listed] if isinstance(listed, int) else listed or [])
            vocab_size = min(vocab_size, settings.get("vocab_size", math.inf))
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def byte_level_alphabet() -> dict[str, int]:
    """Returns the byte of each character of byte-level BPE: printable bytes of Latin-1 stand for themselves, the
    others are the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + at): byte for at, byte in enumerate(others)}
