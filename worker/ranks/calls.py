"""The engine calls that rank 0 sends to the other ranks, in msgpack.

A call has exactly the arguments of the engine's method. `ENGINE_CALLS` lists the methods that change the state of an
engine during serving. All other public methods of an engine run on each rank by itself, at its start.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec
import numpy as np

from mla_router.worker.core import StepPlan, TokenMasks
from mla_router.worker.ranks.errors import CallError

# Bytes of the largest call. A plan with new requests has their prompts, 5 bytes a token at most.
MAX_CALL = 1 << 30


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A call is a tagged array: field names are not sent."""


class Forward(Call, frozen=True):
    """Calls `forward`."""

    plan: StepPlan


class Masks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`TokenMasks` on the wire."""

    rows: tuple[int, ...]
    bits: memoryview  # bytes of [len(rows), words] int32, little-endian

    @classmethod
    def of(cls, masks: TokenMasks) -> Masks:
        bits = np.ascontiguousarray(masks.bits, dtype="<i4")
        return cls(masks.rows, bits.reshape(-1).data.cast("B"))

    def unpack(self) -> TokenMasks:
        """Raises CallError if the rows do not divide the bits."""
        count, size = len(self.rows), self.bits.nbytes
        if count == 0 or size % (4 * count):
            raise CallError(f"token bitmasks of {count} rows in {size} bytes")
        bits = np.frombuffer(bytearray(self.bits), dtype="<i4")
        return TokenMasks(self.rows, bits.reshape(count, -1))


class Sample(Call, frozen=True):
    """Calls `sample` with the output of the last `Forward`."""

    masks: Masks | None = None


EngineCall = Union[Forward, Sample]  # noqa: UP007 (msgspec)
# The methods of an engine that change its state during serving, and their calls.
ENGINE_CALLS: dict[str, type[Call]] = {"forward": Forward, "sample": Sample}

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(EngineCall)


def encode(call: EngineCall) -> bytes:
    """Raises CallError if the call is larger than MAX_CALL."""
    frame = _ENCODER.encode(call)
    if len(frame) > MAX_CALL:
        raise CallError(f"{type(call).__name__} has {len(frame)} bytes, more than {MAX_CALL}")
    return frame


def decode(frame: bytes) -> EngineCall:
    """Raises CallError."""
    try:
        call: EngineCall = _DECODER.decode(frame)
    except msgspec.DecodeError as error:
        raise CallError(f"a call that cannot be decoded: {error}") from error
    return call
