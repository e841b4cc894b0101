"""vLLM's `allowed_token_ids`: no other tokens are sampled, not even to end the answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mla_router.worker.server.errors import InvalidField, InvalidRequest


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    ids: frozenset[int]
    bits: bytes  # bitmask of `ids`, see `SamplingParams.allowed`
    field: str  # the client's field, for error messages

    @classmethod
    def read(cls, ids: list[int] | None, vocab_size: int, field: str) -> AllowedTokens | None:
        """Returns None if all tokens are allowed. Raises InvalidField."""
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
        """Returns the error for a client whose tokens cannot form an answer."""
        return InvalidField(self.field, reason)
