"""Jump-forward decoding: text that the grammar forces is appended without the model (Zheng et al., arXiv:2312.07104).

xgrammar returns the text that must come next. It is tokenized alone. This is exact at its beginning, because a token
has just ended there. The last token is dropped, because it might merge with the following text. An end that may be the
beginning of an added token, such as a marker of calls, is dropped as well: the model never writes such a token in parts.

The forced tokens are a function of the output's tokens. So an output has the same tokens wherever it is interrupted,
and whether or not a run is computed in one step.
"""

from __future__ import annotations

from collections import deque

from mla_router.worker.grammar.protocol import RUN_TOKENS
from mla_router.worker.grammar.vocabulary import Vocabulary
from mla_router.worker.grammar.xgrammar_backend import Matcher

# A run of n tokens saves n - 1 decode steps, but makes one step more expensive. Besides, for texts of two tokens the
# model most often prefers another tokenization.
MIN_RUN = 3
WINDOW = 16 * RUN_TOKENS  # characters that are tokenized at once


class ForcedTokens:
    """Tokenizes forced text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        added = vocabulary.tokenizer.get_added_tokens_decoder().values()
        self._openings = {  # beginnings of added tokens; text has no special ones
            token.content[:end]
            for token in added
            if not token.special
            for end in range(1, len(token.content))
        }
        self._max_opening = max(map(len, self._openings), default=0)

    def run(self, text: str) -> tuple[list[int], str]:
        """Returns the first tokens of `text`, none or MIN_RUN to RUN_TOKENS, and the rest of `text`.

        The tokens do not depend on the following text. A token whose bytes differ from the text ends the run:
        tokenizers may normalize, or add a blank at the beginning. The run ends between two characters, so that the rest
        is text.
        """
        shown = self._without_opening(text[:WINDOW])
        data, at = shown.encode(), 0
        tokens = self._vocabulary.encode(shown)[:-1][:RUN_TOKENS]
        length = end = 0  # of the run, in tokens and in bytes
        for count, token in enumerate(tokens, 1):
            piece = self._vocabulary.pieces[token]
            if not piece or not data.startswith(piece, at):
                break
            at += len(piece)
            if not b"\x80" <= data[at : at + 1] < b"\xc0":  # no byte within a character
                length, end = count, at
        if length < MIN_RUN:
            return [], ""
        return tokens[:length], data[end:].decode() + text[len(shown) :]

    def _without_opening(self, text: str) -> str:
        lengths = range(min(len(text), self._max_opening), 0, -1)
        length = next((length for length in lengths if text[-length:] in self._openings), 0)
        return text[: len(text) - length]


class Output:
    """The state of one output in its grammar, with its forced tokens."""

    def __init__(self, matcher: Matcher, forced: ForcedTokens | None) -> None:
        """`forced` is None: no jump-forward decoding."""
        self.matcher = matcher
        self.run: deque[int] = deque()  # the forced tokens; empty if the model has a choice
        self._forced = forced
        self._text = ""  # forced text after the run; empty: unknown
        self._num_drafts = 0  # last tokens that `drop_drafts` takes back
        self._blanks_before = matcher.num_blanks
        self._look_ahead()

    def accept(self, token: int) -> bool:
        """Accepts one token. Returns False if the grammar does not allow it."""
        if not self.matcher.accept(token):
            return False
        if self.run and self.run[0] == token:
            self.run.popleft()
        else:
            # Another worker may have generated it without jump-forward decoding.
            self.run.clear()
            self._text = ""
        if not self.run:
            self._look_ahead()
        return True

    def accept_draft(self, token: int) -> bool:
        """Accepts one token until `drop_drafts`. Must not be called while tokens are forced. Returns False if the
        grammar does not allow it."""
        assert not self.run, "a forced token needs no draft"
        if not self._num_drafts:
            self._blanks_before = self.matcher.num_blanks
        accepted = self.accept(token)
        self._num_drafts += accepted
        return accepted

    def drop_drafts(self) -> None:
        """Takes back all drafts, and ends with a refused one as well."""
        self.matcher.roll_back(self._num_drafts, self._blanks_before)
        self._num_drafts = 0
        self.run.clear()
        self._text = ""

    def _look_ahead(self) -> None:
        if self._forced is None:
            return
        # The rest of a long text is stored, because xgrammar's time grows with the length of the text.
        text = self._text or self.matcher.forced_text()
        run, self._text = self._forced.run(text) if text else ([], "")
        self.run.extend(run)
