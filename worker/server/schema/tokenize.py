"""The bodies of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

import msgspec


class TokenizeRequest(msgspec.Struct, kw_only=True):
    prompt: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None  # true
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
