"""Facts about a model folder's tokenizer that the server and the grammars both need."""

from __future__ import annotations

import json
import math
from pathlib import Path


def read_eos_ids(folder: Path, of_tokenizer: int | None) -> frozenset[int]:
    """Every token that ends an answer. The three files of a folder often name different ones, and some a token
    that the model does not have."""
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
    """Byte-level BPE writes each byte as one printable character: bytes that are printable in
    Latin-1 as themselves, the others as the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + at): byte for at, byte in enumerate(others)}
