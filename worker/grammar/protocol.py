"""The messages between the scheduler and a grammar worker.

Small frames of msgpack on a SOCK_SEQPACKET pair, which preserves their boundaries. The source of a grammar is passed
as a file descriptor, and masks are in shared memory. Each request gets exactly one frame as its answer, in order.
"""

from __future__ import annotations

from typing import Union

import msgspec

from mla_router.worker.messages import Grammar

MAX_FRAME = 64 << 10
MAX_REASON = 1000  # characters of `Refused.reason`
# Earlier tokens of an output in one `Open`. Matching costs up to 0.1 ms a token, and the step loop may wait for masks
# of the same grammar.
OPEN_TOKENS = 128
RUN_TOKENS = 64  # largest number of forced tokens of a row in `Filled`, and in the next `Fill`
FILL_ROWS = 128  # largest number of rows of one `Fill`; for more rows of a grammar several are sent


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Common layout: a tagged array."""


# -- to the grammar worker ------------------------------------------------------------------------


class Order(msgspec.Struct, frozen=True, array_like=True):
    """The start parameters of a grammar worker, in a file."""

    grammar: Grammar
    compile_cpu_s: float  # limit of the CPU time of the compilation, in seconds


class Open(Frame, frozen=True):
    """Opens request `key`, or continues to open it. `tokens` are the next tokens of its earlier output. The keys in
    `closed` have ended."""

    key: int
    tokens: list[int]
    closed: list[int] = []


class Row(msgspec.Struct, frozen=True, array_like=True):
    """The request for a mask of the tokens that `key` may sample after `tokens`, to be written to row `row` of the
    memory; and for those after each of `drafts`, to be written to the rows after it."""

    key: int
    row: int
    tokens: list[int]  # sampled since the last frame with `key`
    drafts: list[int] = []


class Fill(Frame, frozen=True):
    """Writes masks. The keys in `closed` have ended."""

    rows: list[Row]
    closed: list[int] = []


# -- from the grammar worker ----------------------------------------------------------------------


class Started(Frame, frozen=True):
    """The first frame: the compilation begins."""

    pid: int


class Compiled(Frame, frozen=True):
    """The frame after `Started`: the grammar is valid. Else the frame is `Refused`."""

    eos_ids: list[int]  # tokens that the masks allow at the end of a sentence
    own_bytes: int  # private memory of the process


class Refused(Frame, frozen=True):
    """Answers the compilation, or an `Open`."""

    reason: str


class Opened(Frame, frozen=True):
    """Answers `Open`."""


class Filled(Frame, frozen=True):
    """Answers `Fill`. `strays`: keys whose tokens the grammar does not allow. `runs`: forced tokens by key, for rows where
    the grammar allows only one text; the mask allows only the first of them. `counts`: the number of masks by key, for rows
    with drafts. There is none after a draft that the grammar does not allow, or that ends the text, nor after a mask of
    a forced token."""

    strays: list[int] = []
    runs: dict[int, list[int]] = {}
    counts: dict[int, int] = {}


class Ended(Frame, frozen=True):
    """The process has ended by itself or was killed. The fork server sends this frame, on the socket of that process."""

    status: int  # 0 and more: the exit status; less: the number of the signal, negated


ToWorker = Union[Open, Fill]  # noqa: UP007 (msgspec)
FromWorker = Union[Started, Compiled, Refused, Opened, Filled, Ended]  # noqa: UP007 (msgspec)
