"""The bytes of tokens, compared with the decoders of the tokenizers library."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from mla_router.worker.grammar.vocabulary import read_vocabulary

PIECES = [
    "<eos>",
    "a",
    "\u0120a",
    "\u65e5\u672c",
    "\u0120\u65e5",
    "<0x41>",
    "<0xZZ>",
    "\u0120",
]


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), decoders.ByteFallback()])
def test_each_token_has_the_bytes_of_the_decoder(
    tmp_path: Path, decoder: decoders.ByteLevel | decoders.ByteFallback
) -> None:
    vocabulary = {piece: token for token, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    found = read_vocabulary(tmp_path, len(PIECES) + 1).pieces
    assert found == [b"", *(decoder.decode([piece]).encode() for piece in PIECES[1:]), b""]
