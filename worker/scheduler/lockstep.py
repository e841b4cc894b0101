"""The agreement of DP ranks on their steps (DP attention). They launch each step together, because they share its experts.

The loop of a scheduler has a turn for each step. In a turn each DP rank sends the size of its own step to the others, and
waits for their sizes. If any size is above 0, all ranks launch: those without rows launch an idle step, for the experts.
While the device computes a step, the schedulers agree on the next one, so the device does not wait for them.

After a turn with a step, all DP ranks send their next size without delay. After a turn without one, a DP rank sleeps
until it has a step itself or another rank sends a size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from mla_router.worker.dp_group import Mailbox
from mla_router.worker.engine.runners.choose import fits_decode_graph
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.scheduler.drafts import NOTHING, DecodeOutcome
from mla_router.worker.scheduler.step import Step
from mla_router.worker.step.plan import GroupStep, StepPlan

# The fields of `_Size`, then those of its outcome
_SIZE = struct.Struct("<QIId???IIId??")
_LEAVES = struct.Struct("<I")  # DP rank
WAIT_S = 1.0


class StepGroup(Protocol):
    """The schedulers that launch each step together."""

    @property
    def is_awaited(self) -> bool:
        """Whether another scheduler waits for this one, which then must not sleep."""
        ...

    @property
    def outcomes(self) -> Sequence[DecodeOutcome]:
        """The outcomes that all DP ranks gave to the last `join`."""
        ...

    def join(self, own: Step | None, outcome: DecodeOutcome = NOTHING) -> Step | None:
        """Returns the next step to launch: `own`, an idle one, or None if no scheduler has one. `outcome`: of the last
        step."""
        ...

    def largest(self, value: float) -> float:
        """Returns the largest `value` of all DP ranks. All of them call it equally often, before their first turn."""
        ...

    def may_leave(self) -> bool:
        """Returns whether this scheduler may end. Called between turns, when it has no requests and gets no more."""
        ...


class Alone:
    """Implements `StepGroup` for one scheduler."""

    is_awaited = False
    outcomes = ()

    def join(self, own: Step | None, outcome: DecodeOutcome = NOTHING) -> Step | None:
        del outcome
        return own

    def largest(self, value: float) -> float:
        return value

    def may_leave(self) -> bool:
        return True


class _Size(NamedTuple):
    """The size of a DP rank's own step in a turn. Without one, `rows` is 0."""

    turn: int
    rank: int
    rows: int = 0
    seconds: float = 0.0
    decode: bool = True
    has_prompts: bool = False
    feeds_drafter: bool = False
    draft_slots: int = 0
    outcome: DecodeOutcome = NOTHING

    def pack(self) -> bytes:
        return _SIZE.pack(*self[:-1], *self.outcome)

    @classmethod
    def unpack(cls, message: bytes) -> _Size:
        fields, own = _SIZE.unpack(message), len(cls._fields) - 1
        return cls._make((*fields[:own], DecodeOutcome(*fields[own:])))


class Lockstep:
    """Implements `StepGroup` for one of several DP ranks."""

    def __init__(self, mailbox: Mailbox, heartbeat: Heartbeat) -> None:
        """`heartbeat`: of this scheduler; paused while the scheduler waits for the others."""
        self._mailbox = mailbox
        self._heartbeat = heartbeat
        self._turn = 0
        # Step sizes of this turn and of the next one, by DP rank. No rank can be further ahead: it needs all sizes of a
        # turn
        self._sizes: dict[int, _Size] = {}
        self._early: dict[int, _Size] = {}
        self._has_step = False  # in the last turn
        self._left: set[int] = set()
        self.outcomes: Sequence[DecodeOutcome] = ()

    @property
    def is_awaited(self) -> bool:
        while (message := self._mailbox.receive()) is not None:
            self._note(message)
        return bool(self._sizes)

    def join(self, own: Step | None, outcome: DecodeOutcome = NOTHING) -> Step | None:
        self.outcomes = ()
        if own is None and not self._has_step and not self.is_awaited:
            return None
        sizes = self._agree(self._size_of(own)._replace(outcome=outcome))
        self.outcomes = [size.outcome for size in sizes]
        rows = tuple(size.rows for size in sizes)
        self._has_step = any(rows)
        if not self._has_step:
            return None
        group = GroupStep(
            rows,
            all(size.decode for size in sizes),
            any(size.feeds_drafter for size in sizes),
            max(size.draft_slots for size in sizes),
        )
        longest = max(size.seconds for size in sizes)
        if own is None:
            idle = Step(StepPlan((), (), (), (), (), group), [], [], predicted_s=longest)
            idle.is_typical = False
            return idle
        # The step lasts as long as the longest of the group
        any_prompts = any(size.has_prompts for size in sizes)
        own.is_typical = own.predicted_s == longest if own.plan.chunks else not any_prompts
        own.predicted_s = longest
        own.plan = replace(own.plan, group=group)
        return own

    def may_leave(self) -> bool:
        if self._mailbox.rank not in self._left:
            self._left.add(self._mailbox.rank)
            self._mailbox.send(_LEAVES.pack(self._mailbox.rank))
        # Another one may have begun a turn before it heard of the last leaver
        return len(self._left) == self._mailbox.size and not self._has_step and not self.is_awaited

    def largest(self, value: float) -> float:
        return max(size.seconds for size in self._agree(self._size()._replace(seconds=value)))

    def _size(self) -> _Size:
        return _Size(self._turn, self._mailbox.rank)

    def _size_of(self, own: Step | None) -> _Size:
        size = self._size()
        if own is None:
            return size
        plan = own.plan
        return size._replace(
            rows=plan.num_tokens,
            seconds=own.predicted_s,
            decode=fits_decode_graph(plan),
            has_prompts=bool(plan.chunks),
            feeds_drafter=plan.feeds_drafter,
            draft_slots=plan.draft_slots,
        )

    def _agree(self, own: _Size) -> list[_Size]:
        """Returns the sizes of all DP ranks in this turn, and begins the next turn."""
        self._mailbox.send(own.pack())
        self._sizes[own.rank] = own
        while len(self._sizes) < self._mailbox.size:
            if (message := self._mailbox.receive()) is None:
                with self._heartbeat.paused():
                    message = self._mailbox.receive(WAIT_S)
            if message is not None:
                self._note(message)
        sizes = [self._sizes[rank] for rank in range(self._mailbox.size)]
        self._turn += 1
        self._sizes, self._early = self._early, {}
        return sizes

    def _note(self, message: bytes) -> None:
        if len(message) == _LEAVES.size:
            self._left.add(*_LEAVES.unpack(message))
            return
        size = _Size.unpack(message)
        assert 0 <= size.turn - self._turn <= 1, f"{size} in turn {self._turn}"
        (self._sizes if size.turn == self._turn else self._early)[size.rank] = size
