"""The field by which a router continues a broken stream; see requests/replay.py."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_PROMPTS = 64  # in one HTTP request; also the limit of choices
MAX_CONTINUED_TOKENS = 1 << 20

TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class ContinuedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The part of one choice that the client received before the stream broke."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_CONTINUED_TOKENS)]
    finish_reason: Literal["stop", "length", "abort"] | None = None


class Continuation(msgspec.Struct, forbid_unknown_fields=True):
    """The field that a router adds to the body of a broken stream."""

    response: Annotated[str, Meta(max_length=512, pattern="^[!-~]*$")]
    choices: Annotated[list[ContinuedChoice], Meta(max_length=MAX_PROMPTS)]
    events: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0  # number of events that the client received
