"""The signature of a router that shares a key with this worker.

The router signs the requests that continue a broken stream. Without it a client could put text into an answer, or take
another answer's id. The signature covers the target and the whole body, so it is valid for this request only.
"""

from __future__ import annotations

import hashlib
import hmac

HEADER = "x-mla-signature"


def sign(key: str, target: str, body: bytes) -> str:
    """Returns the HMAC-SHA256 in hexadecimal. `target` is the path with its query, as sent."""
    return hmac.new(key.encode(), target.encode() + b"\n" + body, hashlib.sha256).hexdigest()


def is_signed(key: str, target: str, body: bytes, signature: str) -> bool:
    given = signature.encode(errors="surrogateescape")
    return hmac.compare_digest(sign(key, target, body).encode(), given)
