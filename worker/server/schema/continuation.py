"""The field by which a router asks to go on with a stream that broke; see replay.py."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_PROMPTS = 64  # in one HTTP request, and answers to them
MAX_CONTINUED_TOKENS = 1 << 20

TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class ContinuedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """What the client was given of one choice before its stream broke."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_CONTINUED_TOKENS)]
    finish_reason: Literal["stop", "length", "abort"] | None = None


class Continuation(msgspec.Struct, forbid_unknown_fields=True):
    """What a router adds to the body of a stream that broke; see replay.py."""

    response: Annotated[str, Meta(max_length=512, pattern="^[!-~]*$")]
    choices: Annotated[list[ContinuedChoice], Meta(max_length=MAX_PROMPTS)]
    events: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0  # that the client has had
