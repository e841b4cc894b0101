"""Incremental detokenization: whole UTF-8 characters only, in constant time a token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# A character has at most 4 bytes, so at most 4 tokens. A longer run without a whole character is not text. Without
# this limit the library would decode the whole run again at each token.
MAX_HELD_TOKENS = 32
TAIL_TOKENS = 3  # maximum number of tokens of an incomplete character


class Detokenizer:
    """Converts the token ids of one choice to text.

    It holds back the bytes of incomplete characters. The pieces add up to the text of all ids decoded at once. The
    tokens in `hidden` have no text.
    """

    __slots__ = ("_context", "_hidden", "_pending", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=False)
        self._context: list[int] = []  # tokens of the last piece; some decoders depend on them
        self._pending: list[int] = []  # later tokens, held back

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens. Returns the text that is certain."""
        text = ""
        for token in token_ids:
            if token in self._hidden:
                continue
            self._pending.append(token)
            try:
                piece = self._stream.step(self._tokenizer, token)
            except Exception:  # noqa: BLE001 (the library raises nothing more precise)
                # Tokens of single bytes: the held ones cannot become a character together with this token.
                text += self._restart(len(self._pending))
                continue
            if piece is not None:
                text += piece
                self._context, self._pending = self._pending, []
            elif len(self._pending) > MAX_HELD_TOKENS:
                text += self._restart(len(self._pending) - TAIL_TOKENS)
        return text

    def flush(self) -> str:
        """Ends the text. Returns the text that was held back, with U+FFFD for incomplete characters."""
        text = self._held_text()
        self._pending = []
        return text

    def _held_text(self) -> str:
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        both = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        return both[len(before) :]

    def _restart(self, taken: int) -> str:
        """Returns the text of the first `taken` held tokens, and pushes the others again."""
        rest = self._pending[taken:]
        del self._pending[taken:]
        text = self._held_text()
        self._context, self._pending = self._pending, []
        # The library treats the initial tokens of a stream as text only if they are whole characters.
        is_whole = not self._tokenizer.decode(self._context, skip_special_tokens=False).endswith(
            "\ufffd"
        )
        self._stream = DecodeStream(self._context if is_whole else [], skip_special_tokens=False)
        return text + self.push(rest)
