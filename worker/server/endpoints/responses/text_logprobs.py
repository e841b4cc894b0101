"""Selects the logprobs of the tokens of output texts.

Reasoning, calls and their markers are tokens of the same answer. The parser returns the content and the number of held
characters. This gives the position of each content in the text of the answer, and so its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from mla_router.worker.server.endpoints.logprobs import TokenLogprob, TopLogprob


class TextLogprobs:
    """Collects the tokens of an answer, and returns them with their content."""

    def __init__(self) -> None:
        # With the offsets of their text
        self._tokens: deque[tuple[int, list[TokenLogprob]]] = deque()
        self._end = 0  # length of the answer's text so far, in characters

    def add(self, text: str, tokens: Sequence[TokenLogprob]) -> None:
        """Adds `tokens`, whose text is `text`; "" if their text is not certain yet."""
        self._tokens.append((self._end, [_with_bytes(token) for token in tokens]))
        self._end += len(text)

    def take(self, content: str, held: int) -> list[TokenLogprob]:
        """Returns the tokens of `content`, after which the parser holds back `held` characters.

        Earlier tokens are dropped. A token that is partly a marker belongs to no content.
        """
        end = self._end - held
        begin = end - len(content)
        taken: list[TokenLogprob] = []
        while self._tokens and self._tokens[0][0] < end:
            at, tokens = self._tokens.popleft()
            if at >= begin:
                taken += tokens
        return taken


def _with_bytes(token: TokenLogprob) -> TokenLogprob:
    """Returns the form of /v1/responses, in which unknown bytes are an empty list."""
    top = [TopLogprob(one.token, one.logprob, one.bytes or ()) for one in token.top_logprobs]
    return msgspec.structs.replace(token, bytes=token.bytes or (), top_logprobs=top)
