"""What the scheduler and a grammar's process say to each other.

Frames of msgpack on a SOCK_SEQPACKET pair, which keeps them apart; all are small. The two things
that are not go past it: a grammar's source comes as a file descriptor, masks lie in shared memory.
Requests are answered in order, each by exactly one frame.
"""

from __future__ import annotations

from typing import Union

import msgspec

from mla_router.worker.messages import Grammar

MAX_FRAME = 64 << 10
# Tokens of an output that had begun before, in one `Open`. Matching costs up to 0.1 ms a token, and
# the step loop may be waiting for masks of the same grammar.
OPEN_TOKENS = 128
RUN_TOKENS = 64  # that are forced, in one row of a `Filled`, and so in one of the next `Fill`
FILL_ROWS = 128  # of one `Fill`; a step with more of one grammar takes several


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Common layout: a tagged array."""


# -- to the grammar's process ---------------------------------------------------------------------


class Order(msgspec.Struct, frozen=True, array_like=True):
    """What the process is started with, in a file."""

    grammar: Grammar
    compile_cpu_s: float  # CPU time after which the compilation is ended


class Open(Frame, frozen=True):
    """Make request `key` known, or feed it more: `tokens` are the next of its output."""

    key: int
    tokens: list[int]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A mask that is wanted: what `key` may draw after `tokens`, into row `row` of the memory."""

    key: int
    row: int
    tokens: list[int]  # sampled since the last frame that named `key`


class Fill(Frame, frozen=True):
    """Write masks. Keys in `closed` will not come again."""

    rows: list[Row]
    closed: list[int] = []


# -- from the grammar's process -------------------------------------------------------------------


class Started(Frame, frozen=True):
    """The process has begun to compile. The first frame."""


class Compiled(Frame, frozen=True):
    """The grammar is good. The frame after `Started`, unless `Refused` is."""

    eos_ids: list[int]  # tokens that the masks allow where a sentence may end
    own_bytes: int  # memory that the process does not share


class Refused(Frame, frozen=True):
    """Answers the compilation, or an `Open`."""

    reason: str


class Opened(Frame, frozen=True):
    """Answers `Open`."""


class Filled(Frame, frozen=True):
    """Answers `Fill`. `strays` have been given tokens that the grammar does not allow. `runs`: where
    the grammar allows one text alone for a while, its tokens by key; the mask allows the first."""

    strays: list[int] = []
    runs: dict[int, list[int]] = {}


class Ended(Frame, frozen=True):
    """The process has ended by itself or was killed. The fork server says so, on the socket of that process."""

    status: int  # 0 and more: the exit status; less: the number of the signal, negated


ToWorker = Union[Open, Fill]  # noqa: UP007 (msgspec)
FromWorker = Union[Started, Compiled, Refused, Opened, Filled, Ended]  # noqa: UP007 (msgspec)
