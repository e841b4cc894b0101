"""The masks of a batch equal those of single outputs, with any number of threads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from mla_router.worker.grammar import xgrammar_backend
from mla_router.worker.grammar.vocabulary import Vocabulary
from mla_router.worker.grammar.xgrammar_backend import BatchFiller, Compiler, Matcher
from mla_router.worker.messages import Grammar

PIECES = [b"", *(bytes([octet]) for octet in range(32, 127))]
WRITTEN = ["", "[", "[ ", '["a', '["a" ', '["a", ', '["a", 12', '["a", 12]']


@pytest.mark.parametrize("by_threads", [None, 0, 1, 5, 7])
def test_masks(monkeypatch: pytest.MonkeyPatch, by_threads: int | None) -> None:
    """The texts include blanks, which are limited outside xgrammar."""
    compiler = Compiler(Vocabulary(PIECES, [0], Tokenizer(BPE())))
    item = {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]}
    grammar = Grammar("json_schema", str(item).replace("'", '"'))
    compiled = compiler.compile(grammar)

    def begin(text: str) -> Matcher:
        matcher = compiler.begin(grammar, compiled)
        assert all(matcher.accept(PIECES.index(char.encode())) for char in text), text
        return matcher

    words = -(-len(PIECES) // 32)
    alone = np.zeros((len(WRITTEN), words), dtype=np.int32)
    for row, text in enumerate(WRITTEN):
        begin(text).fill(alone, row)
    assert len({mask.tobytes() for mask in alone}) == 7, "one text more ends as another does"

    late = len(WRITTEN) - (by_threads if by_threads is not None else -1)  # rows, when time is up
    clock = iter([0.0, *(float(done >= late) for done in range(1, len(WRITTEN) + 1))])
    # Only in this module: other callers of the clock must not use up ticks.
    monkeypatch.setattr(xgrammar_backend, "time", SimpleNamespace(perf_counter=clock.__next__))
    masks = np.zeros((len(WRITTEN) + 2, words), dtype=np.int32)
    rows = list(range(len(WRITTEN), 0, -1))
    BatchFiller(2).fill([begin(text) for text in WRITTEN], masks, rows)
    assert (masks[rows] == alone).all()
    assert not masks[[0, -1]].any()
