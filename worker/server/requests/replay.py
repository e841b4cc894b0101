"""Mid-stream replay: what another worker needs to go on with a stream that breaks.

A router asks for it by the header `x-mla-replay: 1` on a streamed request; without the header
nothing here has any effect. The worker then answers with a header of the same name, the `Origin`,
and lists the tokens of each event in comment lines before its data, one for each choice that has
new tokens or has ended:

    :mla <choice> <id>,<id>,...[ <finish reason>]

The text delivered so far is a function of the ids listed so far, and so is all other state: the
noise of the sampler (kernels/sampling/noise.py), the detokenizer, the stop strings. So to go on, the
router sends the same body to another worker, with what it was given added to it:

    "continuation": {"response": <the header>, "choices": [{"token_ids": [...],
                     "finish_reason": null or the one that was listed}, ...],
                     "events": <how many events the client has had>}

Only a router may say so: it signs the request (signature.py) with a key that it shares with its workers. A
worker without a key offers no replay.

Choices that were never listed may be missing at the end. The stream that answers has only what is
new. Ids are computed again as a part of the prompt, so a second worker that has the prompt in its
prefix cache starts from there.

A token of /v1/responses may make several events, and each has a number. They, too, are a function of
the ids, since a stream of that kind takes its tokens one by one: they are made again from the first
on, and as many left out as the client has had.
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
# From one answer's seed to the next one's: so large that the answers of two requests whose seeds are close to
# each other have none in common.
SEED_STEP = 0x1E3779B97F4A7C15

Count = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Origin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an answer was begun with, as far as the request's body does not tell."""

    id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    created: Annotated[int, Meta(ge=0, lt=1 << 40)]
    fingerprint: Annotated[str, Meta(pattern="^fp_[0-9a-f]{10}$")]
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    seed_step: Annotated[int, Meta(ge=0, le=1)]  # from one prompt's seed to the next's
    # Of each answer; None if it had not begun when the header was sent.
    cached_tokens: Annotated[list[Count | None], Meta(max_length=MAX_PROMPTS)] = []

    def seed_of(self, choice: int, n: int) -> int:
        """`n` is the number of answers to each prompt, which lie beside each other. The first has the request's
        own seed."""
        prompt, answer = divmod(choice, n)
        return (self.seed + (prompt * n * self.seed_step + answer) * SEED_STEP) & ((1 << 63) - 1)

    def encode(self) -> str:
        """Visible ASCII that needs no escapes in JSON; at most 512 bytes, for 64 prompts, too."""
        return VERSION + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def decode(cls, text: str) -> Origin:
        if not text.startswith(VERSION):
            raise _invalid("response", "written by another version of the worker")
        try:
            packed = base64.b64decode(text.removeprefix(VERSION), b"-_", validate=True)
            return msgspec.msgpack.decode(packed, type=cls)
        except (binascii.Error, msgspec.MsgspecError, UnicodeDecodeError):
            raise _invalid("response", "not what a worker has written") from None


@dataclass(frozen=True, slots=True)
class Replay:
    """The router keeps account of a stream, which may be the continuation of a broken one."""

    origin: Origin | None = None
    choices: Sequence[ContinuedChoice] = ()
    events: int = 0  # that the client has had

    def check(self, choices: int, vocab_size: int) -> None:
        """Refuse what no worker can have listed. A wrong id would fail in a step, for everybody."""
        if len(self.choices) > choices:
            raise _invalid("choices", f"{len(self.choices)} for {choices}")
        if self.origin is not None and len(self.origin.cached_tokens) != choices:
            raise _invalid("response", f"of another request: this one has {choices} choices")
        for index, choice in enumerate(self.choices):
            if max(choice.token_ids, default=0) >= vocab_size:
                raise invalid_ids(index, f"must be between 0 and {vocab_size - 1}")

    def check_events(self, made: int) -> None:
        """Refuse more than the tokens make: as many of the new ones would be left out."""
        if self.events > made:
            raise _invalid("events", f"{self.events}, but the tokens make {made}")


@dataclass(slots=True)
class Marks:
    """Writes the comment lines, if the router wants them."""

    wanted: bool
    _ids: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, choice: int, token_ids: list[int]) -> None:
        """These tokens are in the event that is made next for this choice, or behind its text."""
        if self.wanted:
            self._ids[choice] += token_ids

    def take(self, choice: int, finish_reason: str | None = None) -> bytes:
        """The line of an event of this choice; without anything to list, none."""
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
    """What the router asks for by header and body, once `read_body` has read it; None if there is no router
    that asks, or if the answer is none that can be continued."""
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
