"""A bound on blanks in JSON: between its values there may be any number, and a model can go on for ever.

xgrammar can count them, but takes twice as long for a mask then. So the masks of an output that has ended in
many blanks leave out the tokens that are nothing else, wherever that is: inside a string, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_BLANKS = 100  # characters in a row
_BLANK = b" \t\r\n"


class BlankTokens:
    """How many blanks each token ends in, and which are nothing else."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """`pieces[i]` are the bytes of token i."""
        self.trailing = [len(piece) - len(piece.rstrip(_BLANK)) for piece in pieces]
        self.alone = [bool(piece) and not piece.strip(_BLANK) for piece in pieces]
        others = np.packbits(~np.array(self.alone), bitorder="little")
        padded = np.zeros(-(-len(pieces) // 32) * 4, dtype=np.uint8)
        padded[: len(others)] = others
        self.others = padded.view(np.int32)  # a mask


class BlankRun:
    """The blanks that one output ends in."""

    def __init__(self, tokens: BlankTokens) -> None:
        self._tokens = tokens
        self._length = 0

    def add(self, token: int) -> None:
        """The output goes on by this token."""
        before = self._length if self._tokens.alone[token] else 0
        self._length = before + self._tokens.trailing[token]

    def bound(self, mask: np.ndarray) -> None:
        """Take out of `mask` [ceil(vocab / 32)] int32 what would make too long a run longer, unless it
        allows nothing else."""
        if self._length < MAX_BLANKS:
            return
        bounded = mask & self._tokens.others
        if bounded.any():
            mask[:] = bounded
