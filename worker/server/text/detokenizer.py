"""Tokens to text, as they come: UTF-8-safe and in constant time a token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# A character is at most 4 bytes, so at most 4 tokens. A longer run without a whole character is
# not text at all; without a bound, the library decodes the whole run again at each token.
MAX_HELD_TOKENS = 32
TAIL_TOKENS = 3  # tokens that can still be the beginning of a character


class Detokenizer:
    """Turns the token ids of one request into text.

    Bytes that do not yet make a character are held back. The pieces add up to what decoding all
    ids at once gives. Special tokens are left out.
    """

    __slots__ = ("_context", "_hidden", "_pending", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=False)
        self._context: list[int] = []  # the tokens of the last piece: some decoders look back
        self._pending: list[int] = []  # tokens since then, held back

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that is certain by now."""
        text = ""
        for token in token_ids:
            if token in self._hidden:
                continue
            self._pending.append(token)
            try:
                piece = self._stream.step(self._tokenizer, token)
            except Exception:  # noqa: BLE001 (the library raises nothing more precise)
                # Tokens of single bytes: those that were text are broken beside what has come now
                text += self._begin_anew(len(self._pending))
                continue
            if piece is not None:
                text += piece
                self._context, self._pending = self._pending, []
            elif len(self._pending) > MAX_HELD_TOKENS:
                text += self._begin_anew(len(self._pending) - TAIL_TOKENS)
        return text

    def flush(self) -> str:
        """No more tokens will come: the text of those held back, with U+FFFD for broken bytes."""
        text = self._held_text()
        self._pending = []
        return text

    def _held_text(self) -> str:
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        both = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        return both[len(before) :]

    def _begin_anew(self, taken: int) -> str:
        """The first `taken` of the tokens held back are text as they are, and the others are looked at again."""
        rest = self._pending[taken:]
        del self._pending[taken:]
        text = self._held_text()
        self._context, self._pending = self._pending, []
        # The stream takes what it begins with for text only if that is whole
        is_whole = not self._tokenizer.decode(self._context, skip_special_tokens=False).endswith(
            "\ufffd"
        )
        self._stream = DecodeStream(self._context if is_whole else [], skip_special_tokens=False)
        return text + self.push(rest)
