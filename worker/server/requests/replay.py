"""Mid-stream replay: another worker continues a broken stream.

A router asks for it by the header `x-mla-replay: 1` on a streamed request. Without this header the module has no
effect. The worker returns a header of the same name, the `Origin`. Before the data of each event it lists the tokens
of the event in comment lines, one line for each choice that has new tokens or has ended:

    :mla <choice> <id>,<id>,...[ <finish reason>]

The text of the stream is a function of these ids, and so is all other state: the noise of the sampler
(kernels/sampling/noise.py), the detokenizer, the stop strings. To continue, the router sends the same body to another
worker, with this field:

    "continuation": {"response": <the header>, "choices": [{"token_ids": [...],
                     "finish_reason": null or the one that was listed}, ...],
                     "events": <the number of events that the client received>}

Only a router may send this field. The router signs the request (http/signature.py) with a key that it shares with its
workers. A worker without a key offers no replay.

`choices` may end with the last choice that was listed. The new stream has only new events. The worker computes the ids
as a part of the prompt, so it uses its prefix cache.

A token of /v1/responses may make several numbered events. They are a function of the ids as well, because these streams
process their tokens one by one. The worker makes all events again and drops those that the client has received.
"""

from __future__ import annotations

import base64
import binascii
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from mla_router.worker.server.errors import InvalidField, InvalidRequest
from mla_router.worker.server.http.body import SIGNED
from mla_router.worker.server.schema.continuation import MAX_PROMPTS, Continuation, ContinuedChoice
from mla_router.worker.server.state import STATE

HEADER = "x-mla-replay"
VERSION = "2."
# The difference between the seeds of two choices. It is large, so that requests with similar seeds share no seed.
SEED_STEP = 0x1E3779B97F4A7C15

Count = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Origin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The start values of an answer that are not in the request's body."""

    id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    created: Annotated[int, Meta(ge=0, lt=1 << 40)]
    fingerprint: Annotated[str, Meta(pattern="^fp_[0-9a-f]{10}$")]
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    seed_step: Annotated[int, Meta(ge=0, le=1)]  # 0: all prompts have the same seeds
    # For each choice; None if the choice had not begun when the header was sent.
    cached_tokens: Annotated[list[Count | None], Meta(max_length=MAX_PROMPTS)] = []

    def seed_of(self, choice: int, n: int) -> int:
        """Returns the seed of a choice. `n` is the number of choices of each prompt. The first choice has the
        request's own seed."""
        prompt, answer = divmod(choice, n)
        return (self.seed + (prompt * n * self.seed_step + answer) * SEED_STEP) & ((1 << 63) - 1)

    def encode(self) -> str:
        """Returns visible ASCII without characters that JSON escapes; at most 512 bytes, even for 64 prompts."""
        return VERSION + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def decode(cls, text: str) -> Origin:
        if not text.startswith(VERSION):
            raise _invalid("response", "comes from another version of the worker")
        try:
            packed = base64.b64decode(text.removeprefix(VERSION), b"-_", validate=True)
            return msgspec.msgpack.decode(packed, type=cls)
        except (binascii.Error, msgspec.MsgspecError, UnicodeDecodeError):
            raise _invalid("response", "does not come from a worker") from None


@dataclass(frozen=True, slots=True)
class Replay:
    """The router's request to make a stream continuable. With an `origin`, the stream continues a broken one."""

    origin: Origin | None = None
    choices: Sequence[ContinuedChoice] = ()
    events: int = 0  # number of events that the client has received

    def check(self, choices: int, vocab_size: int) -> None:
        """Raises InvalidRequest for values that no worker can have listed. A wrong id would fail the whole step."""
        if len(self.choices) > choices:
            raise _invalid("choices", f"{len(self.choices)} for {choices}")
        if self.origin is not None and len(self.origin.cached_tokens) != choices:
            raise _invalid("response", f"of another request: this one has {choices} choices")
        for index, choice in enumerate(self.choices):
            if max(choice.token_ids, default=0) >= vocab_size:
                raise invalid_ids(index, f"must be between 0 and {vocab_size - 1}")

    def check_events(self, made: int) -> None:
        """Raises InvalidRequest if the client has more events than the tokens make: new events would be dropped."""
        if self.events > made:
            raise _invalid("events", f"{self.events}, but the tokens make {made}")


@dataclass(slots=True)
class Marks:
    """Writes the comment lines, if a router asks for them."""

    wanted: bool
    _ids: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, choice: int, token_ids: list[int]) -> None:
        """Adds tokens to the next line of `choice`."""
        if self.wanted:
            self._ids[choice] += token_ids

    def take(self, choice: int, finish_reason: str | None = None) -> bytes:
        """Returns the line of the next event of `choice`; empty if there is nothing to list."""
        if not self.wanted:
            return b""
        ids = self._ids.pop(choice, [])
        if not (ids or finish_reason):
            return b""
        reason = f" {finish_reason}" if finish_reason else ""
        return f":mla {choice} {','.join(map(str, ids))}{reason}\n".encode()


def read_replay(
    request: web.Request, continuation: Continuation | None, *, possible: bool
) -> Replay | None:
    """Returns the router's request for replay, or None. Call `read_body` first, which checks the signature.

    `possible`: another worker can continue this kind of answer. Raises InvalidRequest.
    """
    has_key = bool(request.app[STATE].config.replay_key)
    asked = possible and has_key and request.headers.get(HEADER) == "1"
    if continuation is None:
        return Replay() if asked else None
    if not request.get(SIGNED):
        raise InvalidField("continuation", "only for routers, which sign it with --replay-key")
    if not asked:
        raise InvalidField("continuation", f"only for a stream that was begun with `{HEADER}: 1`")
    origin = Origin.decode(continuation.response)
    return Replay(origin, continuation.choices, continuation.events)


def invalid_ids(choice: int, message: str) -> InvalidRequest:
    return _invalid(f"choices[{choice}].token_ids", message)


def _invalid(where: str, message: str) -> InvalidRequest:
    return InvalidField("continuation." + where, message)
