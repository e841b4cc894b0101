"""The engine calls that rank 0 sends to the other ranks, in msgpack.

A call has exactly the arguments of the engine's method. `ENGINE_CALLS` lists the methods that change the state of an
engine during serving. All other public methods of an engine run on each rank by itself, at its start.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from mla_router.worker.images import ImagePart
from mla_router.worker.mask_memory import MaskMemory
from mla_router.worker.ranks.errors import CallError
from mla_router.worker.step.plan import StepPlan, TokenMasks

# Bytes of the largest call. A plan with new requests has their prompts, 5 bytes a token at most.
MAX_CALL = 1 << 30


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A call is a tagged array: field names are not sent."""


class Forward(Call, frozen=True):
    """Calls `forward`."""

    plan: StepPlan


class Masks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`TokenMasks` on the wire. The bits stay in the memory that all ranks map."""

    rows: tuple[int, ...]
    step: int
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, masks: TokenMasks) -> Masks:
        assert masks.step, "token bitmasks that other ranks cannot read"
        return cls(masks.rows, masks.step, masks.counts)

    def read(self, memory: MaskMemory) -> TokenMasks:
        """Returns the bitmasks, without a copy. Raises CallError if the memory has not as many, or no longer."""
        count = sum(self.counts) if self.counts else len(self.rows)
        if not 0 < count <= memory.max_rows:
            raise CallError(f"{count} token bitmasks, not 1 to {memory.max_rows}")
        self.check(memory)
        return TokenMasks(self.rows, memory.of(self.step)[:count], self.step, self.counts)

    def check(self, memory: MaskMemory) -> None:
        """Raises CallError if other bitmasks are in the place of these: bits that were read before may be theirs."""
        if not memory.has(self.step):
            raise CallError(f"the token bitmasks of step {self.step} were overwritten")


class Sample(Call, frozen=True):
    """Calls `sample` with the output of the last `Forward`."""

    masks: Masks | None = None


class Encode(Call, frozen=True):
    """Calls `encode`."""

    parts: tuple[ImagePart, ...]
    dropped: tuple[int, ...]


class EncodeLayers(Call, frozen=True):
    """Calls `encode_layers`."""

    count: int


EngineCall = Union[Forward, Sample, Encode, EncodeLayers]  # noqa: UP007 (msgspec)
# The methods of an engine that change its state during serving, and their calls.
ENGINE_CALLS: dict[str, type[Call]] = {
    "forward": Forward,
    "sample": Sample,
    "encode": Encode,
    "encode_layers": EncodeLayers,
}

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
