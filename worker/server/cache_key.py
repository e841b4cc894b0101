"""What separates prefix caches: requests share cached prefixes only within one key."""

from __future__ import annotations

from mla_router.worker.server.errors import InvalidField

MAX_LENGTH = 256


def cache_key(cache_salt: str | None, extra_key: str | None) -> str:
    """One key of vLLM's field and SGLang's. Whoever gives both shares only with those who give the same two.
    Raises InvalidField."""
    salt, extra = cache_salt or "", extra_key or ""
    for field, value in (("cache_salt", salt), ("extra_key", extra)):
        if len(value) > MAX_LENGTH:
            raise InvalidField(field, f"at most {MAX_LENGTH} characters")
    # The length tells where the salt ends: "ab" and "c" are not "a" and "bc".
    return f"{len(salt)}:{salt}{extra}" if extra else salt
