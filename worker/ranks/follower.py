"""The loop of a rank without a scheduler: it repeats the calls of rank 0 on its own engine.

The ranks send nothing to rank 0. All ranks have the same plans, logits and noise, so each rank samples the same tokens
itself.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn, Protocol

from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.mask_memory import MaskMemory
from mla_router.worker.ranks.calls import Encode, EncodeLayers, EngineCall, Forward, Sample
from mla_router.worker.step.engine import PendingStep, StepEngine

HEARTBEAT_S = 0.5
# Step N is launched when step N-2 is complete, here and on rank 0, because engines reuse the host memory of step N-2.
_IN_FLIGHT = 2


class Receiver(Protocol):
    def receive(self, timeout_s: float) -> EngineCall | None: ...


class Follower:
    """Runs engine calls, and keeps the heartbeat of its rank."""

    def __init__(
        self, engine: StepEngine[Any], own: Heartbeat, leader: Heartbeat, masks: MaskMemory
    ) -> None:
        """`own` and `leader`: the heartbeats of this rank and of rank 0. `masks`: the bitmasks of the calls."""
        self._engine = engine
        self._masks = masks
        self._own = own
        self._leader = leader
        self._launched: Any = None  # output of the last `forward`
        self._pending: deque[PendingStep] = deque()

    def run(self, receiver: Receiver) -> NoReturn:
        """Runs all calls until the process ends. Raises CallError, and any error of a call."""
        while True:
            self.beat()
            call = receiver.receive(HEARTBEAT_S)
            if call is not None:
                self._own.expect(self._leader.expected_s)
                self.do(call)

    def beat(self) -> None:
        """Updates the heartbeat. It starts when rank 0 serves, because the first steps may compile for a long time."""
        if not self._own.pid and self._leader.pid:
            self._own.start()
        self._own.update()

    def do(self, call: EngineCall) -> None:
        """Runs `call`. Before step N is launched, step N-2 is complete."""
        match call:
            case Forward(plan):
                while len(self._pending) >= _IN_FLIGHT:
                    self._pending.popleft().wait()
                self._launched = self._engine.forward(plan)
            case Encode(parts, dropped):
                self._engine.encode(parts, dropped)
            case EncodeLayers(count):
                self._engine.encode_layers(count)
            case Sample(masks):
                launched, self._launched = self._launched, None
                assert launched is not None, "a Sample without a Forward before it"
                if masks is None:
                    self._pending.append(self._engine.sample(launched))
                    return
                self._pending.append(self._engine.sample(launched, masks.read(self._masks)))
                masks.check(self._masks)
