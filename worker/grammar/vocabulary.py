"""The bytes of all tokens, for the matching of grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from mla_router.worker.tokenizer_files import MalformedError, byte_level_alphabet, read_eos_ids

# The first byte of special tokens. No text contains it. So a grammar allows such a token only where it names the
# token's id or allows any bytes. xgrammar never allows a token without bytes.
SPECIAL = b"\xff"


class VocabularyError(Exception):
    """The folder has no tokenizer with known bytes of its tokens. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of each token of a model. `pieces[i]` are the bytes of token i; for a special token SPECIAL and its
    name. EOS tokens and padding ids of the model's last layer have no bytes."""

    pieces: list[bytes]
    eos_ids: list[int]  # EOS tokens
    tokenizer: tokenizers.Tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text`, without special tokens around it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def read_vocabulary(
    folder: Path, vocab_size: int, tokenizer_folder: Path | None = None
) -> Vocabulary:
    """Reads the vocabulary of the model in `folder`, whose logits are [.., vocab_size]. The tokenizer is in
    `tokenizer_folder`, by default the same. Raises VocabularyError.

    It reads tokenizer.json directly, because the import of transformers takes seconds.
    """
    source = tokenizer_folder or folder
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    except Exception as error:  # the library raises nothing more precise
        raise VocabularyError(f"{source}: no usable tokenizer.json ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder()
    decoders = _names(json.loads(tokenizer.to_str())["decoder"])
    if "ByteLevel" in decoders:
        bytes_of: Callable[[str], bytes] = partial(_of_byte_level, byte_level_alphabet())
    elif "ByteFallback" in decoders:
        bytes_of = _of_byte_fallback
    else:
        raise VocabularyError(f"{folder}: tokens that are not made of bytes (decoder {decoders})")
    pieces = [b""] * vocab_size
    for piece, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token >= vocab_size:
            continue
        if token in added:
            pieces[token] = SPECIAL * added[token].special + piece.encode()
        else:
            pieces[token] = bytes_of(piece)
    named = _named_eos(source)
    try:
        eos_ids = read_eos_ids(folder, tokenizer.token_to_id(named) if named else None)
    except MalformedError as error:
        raise VocabularyError(str(error)) from error
    if not eos_ids:
        raise VocabularyError(f"{folder}: no token that ends an answer")
    for token in eos_ids:
        pieces[token] = b""
    return Vocabulary(pieces, sorted(eos_ids), tokenizer)


def _of_byte_level(alphabet: Mapping[str, int], piece: str) -> bytes:
    """Returns the bytes of a token of byte-level BPE. One with a character that is no byte is text, as for the decoder."""
    if all(char in alphabet for char in piece):
        return bytes(alphabet[char] for char in piece)
    return piece.encode()


def _of_byte_fallback(piece: str) -> bytes:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


def _names(decoder: dict[str, Any] | None) -> list[str]:
    """Returns the types of a decoder and its inner decoders."""
    if decoder is None:
        return []
    return [decoder["type"], *(name for one in decoder.get("decoders", []) for name in _names(one))]


def _named_eos(folder: Path) -> str | None:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
