"""vLLM's `allowed_token_ids`: the only tokens that an answer is made of, its end included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mla_router.worker.server.errors import InvalidField, InvalidRequest


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    ids: frozenset[int]
    bits: bytes  # see `SamplingParams.allowed`
    field: str  # where the client has written them, for error messages

    @classmethod
    def read(cls, ids: list[int] | None, vocab_size: int, field: str) -> AllowedTokens | None:
        """None: all tokens are allowed. Raises InvalidField."""
        if ids is None:
            return None
        if not 1 <= len(ids) <= vocab_size:
            raise InvalidField(field, f"give 1 to {vocab_size} ids, got {len(ids)}")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidField(field, f"ids must be between 0 and {vocab_size - 1}")
        is_allowed = np.zeros(vocab_size, dtype=np.bool_)
        is_allowed[ids] = True
        return cls(frozenset(ids), np.packbits(is_allowed, bitorder="little").tobytes(), field)

    def refused(self, reason: str) -> InvalidRequest:
        """The error that says why these tokens make no answer."""
        return InvalidField(self.field, reason)
