"""Log-probabilities of the tokens that an output text is made of, and of no others.

Reasoning, calls and the markers around them are tokens of the same answer. The parser says which text is
content, and how much it holds back; so the place of each content in the answer's text is known, and with it
its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from mla_router.worker.server.endpoints.logprobs import TokenLogprob, TopLogprob


class TextLogprobs:
    """Takes an answer's tokens as they come, and gives them away with the content that shows them."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[int, list[TokenLogprob]]] = deque()  # by where their text begins
        self._end = 0  # of the answer's text so far, in characters

    def add(self, text: str, tokens: Sequence[TokenLogprob]) -> None:
        """`tokens` have added `text` to the answer: "" if it is not certain yet."""
        self._tokens.append((self._end, [_with_bytes(token) for token in tokens]))
        self._end += len(text)

    def take(self, content: str, held: int) -> list[TokenLogprob]:
        """Return the tokens of `content`, behind which the parser holds back `held` characters.

        Forget the tokens before. A token whose text is shared with a marker belongs to neither.
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
    """In the form of /v1/responses, where bytes that are not known are none."""
    top = [TopLogprob(one.token, one.logprob, one.bytes or ()) for one in token.top_logprobs]
    return msgspec.structs.replace(token, bytes=token.bytes or (), top_logprobs=top)
