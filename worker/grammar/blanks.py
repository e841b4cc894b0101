"""Limits runs of blanks in JSON. The grammar allows any number between values, and a model may write them for ever.

xgrammar can count blanks, but then a mask takes twice as long. So after a long run of blanks this module removes the
tokens of blanks only from the mask, even inside a string.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_BLANKS = 100  # characters in a row
_BLANK = b" \t\r\n"


class BlankTokens:
    """The number of blanks at the end of each token, and the tokens that consist of blanks."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """`pieces[i]` are the bytes of token i."""
        self.trailing = [len(piece) - len(piece.rstrip(_BLANK)) for piece in pieces]
        self.alone = [bool(piece) and not piece.strip(_BLANK) for piece in pieces]
        others = np.packbits(~np.array(self.alone), bitorder="little")
        padded = np.zeros(-(-len(pieces) // 32) * 4, dtype=np.uint8)
        padded[: len(others)] = others
        self.others = padded.view(np.int32)  # a mask


class BlankRun:
    """The run of blanks at the end of one output."""

    def __init__(self, tokens: BlankTokens) -> None:
        self._tokens = tokens
        self.length = 0  # characters

    def add(self, token: int) -> None:
        """Adds the next token of the output."""
        before = self.length if self._tokens.alone[token] else 0
        self.length = before + self._tokens.trailing[token]

    def bound(self, mask: np.ndarray) -> None:
        """Removes tokens of blanks from `mask` [ceil(vocab / 32)] int32 after a long run, unless the mask has no
        others."""
        if self.length < MAX_BLANKS:
            return
        bounded = mask & self._tokens.others
        if bounded.any():
            mask[:] = bounded
