"""The engine of rank 0 as the scheduler sees it: each call goes to the other ranks, then runs here."""

from __future__ import annotations

from typing import Generic, Protocol

import numpy as np

from mla_router.worker.images import ImagePart
from mla_router.worker.ranks.calls import (
    Encode,
    EncodeLayers,
    EngineCall,
    Forward,
    Masks,
    Sample,
)
from mla_router.worker.step.engine import (
    Capacity,
    ForwardT,
    PendingImages,
    PendingStep,
    StepEngine,
)
from mla_router.worker.step.plan import StepPlan, TokenMasks


class Sender(Protocol):
    def send(self, call: EngineCall, bits: np.ndarray | None = None) -> None: ...


class Leader(Generic[ForwardT]):
    """Implements `StepEngine`. The other ranks launch while this one does: a call is sent before it runs."""

    def __init__(self, engine: StepEngine[ForwardT], sender: Sender) -> None:
        self._engine = engine
        self._sender = sender

    @property
    def capacity(self) -> Capacity:
        return self._engine.capacity

    def forward(self, plan: StepPlan) -> ForwardT:
        self._sender.send(Forward(plan))
        return self._engine.forward(plan)

    def sample(self, forward_output: ForwardT, masks: TokenMasks | None = None) -> PendingStep:
        if masks is None:
            self._sender.send(Sample())
        else:
            self._sender.send(Sample(Masks.of(masks)), masks.bits)
        return self._engine.sample(forward_output, masks)

    def encode(self, parts: tuple[ImagePart, ...], dropped: tuple[int, ...]) -> PendingImages:
        self._sender.send(Encode(parts, dropped))
        return self._engine.encode(parts, dropped)

    def encode_layers(self, count: int) -> None:
        self._sender.send(EncodeLayers(count))
        self._engine.encode_layers(count)

    def is_usable_after(self, error: Exception) -> bool:
        # The other ranks may have run the step, or wait for this one in an exchange.
        del error
        return False
