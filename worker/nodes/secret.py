"""Keys and proofs from the secret that the nodes share (--dist-key).

All are HMAC-SHA256 of a purpose and of values that both sides know. The secret itself is never sent.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

SIZE = 32  # bytes of a key, a proof, a nonce


def derive(secret: str, purpose: str, *values: bytes) -> bytes:
    """Returns SIZE bytes for this purpose and these values. Without the secret nobody can compute or verify them."""
    parts = (purpose.encode(), *values)
    # With their lengths, so that no two lists of parts are the same bytes
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret.encode(), text, sha256)


def nonce() -> bytes:
    return secrets.token_bytes(SIZE)


def equal(one: bytes, other: bytes) -> bool:
    """Compares in a time that does not depend on the contents."""
    return hmac.compare_digest(one, other)


class Seal:
    """Appends and checks the tags of the frames in one direction. The number of the frame is part of its tag, so none can
    be changed, repeated, left out or moved."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def tag(self, payload: bytes) -> bytes:
        """Returns the tag of the next frame."""
        number, self._number = self._number, self._number + 1
        return hmac.digest(self._key, number.to_bytes(8, "big") + payload, sha256)
