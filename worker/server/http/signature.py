"""Proof that a request was written by a router which shares a key with this worker.

The router signs the requests by which it continues a broken stream. A client's word there would put
text into another's answer, or take its id. The signature covers the target and the whole body, so that it is
good for this one request.
"""

from __future__ import annotations

import hashlib
import hmac

HEADER = "x-mla-signature"


def sign(key: str, target: str, body: bytes) -> str:
    """HMAC-SHA256 in hexadecimal; `target` is the path with its query, as it is sent."""
    return hmac.new(key.encode(), target.encode() + b"\n" + body, hashlib.sha256).hexdigest()


def is_signed(key: str, target: str, body: bytes, signature: str) -> bool:
    given = signature.encode(errors="surrogateescape")
    return hmac.compare_digest(sign(key, target, body).encode(), given)
