"""What the servers and the scheduler of one worker say to each other.

msgspec structs in msgpack over ZMQ PUSH/PULL on ipc sockets: decoding builds only these types. A
server process goes by its number; `server` is that of the one which gets the answer.
"""

from __future__ import annotations

from typing import Literal, Union

import msgspec

from mla_router.worker.core import Logprobs, SamplingParams


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Common layout: a tagged array, so that field names cost nothing on the wire."""


# -- server to scheduler ------------------------------------------------------------------------


class Grammar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the output must be a sentence of."""

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    source: str  # any JSON is the schema {}


class Generate(Message, frozen=True):
    """Compute what follows `prompt` and `output`, up to `max_tokens` tokens of output.

    `output` is empty but for a request that goes on where another worker has stopped: its tokens
    count as generated, and are not sent again.
    """

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    output: list[int] = []
    cache_salt: str = (
        ""  # `cache_key` of the server: requests share cached prefixes only within one salt
    )
    priority: int = 0  # higher comes first, where priorities are enabled
    grammar: Grammar | None = None
    server: int = 0


class Abort(Message, frozen=True):
    """End a request at once, in whatever state it is. Unknown ids are ignored: it may just have
    finished."""

    rid: str


class GetStats(Message, frozen=True):
    """Ask for exact accounting; answered by `Stats` with the same `query`."""

    query: int
    server: int = 0


class FlushCache(Message, frozen=True):
    """Drop every cached prefix that no running request holds; answered by `Stats`."""

    query: int
    server: int = 0


class StartProfile(Message, frozen=True):
    """Trace the next steps, if the worker has a folder for that; answered by `Profiled`."""

    query: int
    num_steps: int
    server: int = 0


class StopProfile(Message, frozen=True):
    """Write the trace, if it has not been written by itself; answered by `Profiled`."""

    query: int
    server: int = 0


class Shutdown(Message, frozen=True):
    """Leave the step loop and exit."""


# -- scheduler to server ------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """Sent once to each server: the weights are loaded and the first request may come."""

    max_total_num_tokens: int
    page_size: int
    max_running_requests: int
    context_length: int
    vocab_size: int
    device: str
    dtype: str
    attention_backend: str


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one request.

    The first delta of a request tells `cached_tokens`, and its `prompt_logprobs` if they were asked
    for. `finish_reason` is a `FinishReason` value, or empty while more will come. `error` says why
    it is "error", "lost" or "refused".
    """

    rid: str
    token_ids: list[int]
    logprobs: Logprobs | None = None  # of token_ids
    cached_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    prompt_logprobs: Logprobs | None = None
    queue_seconds: float = 0.0  # with the first: from its arrival until it was first admitted


class Deltas(Message, frozen=True):
    """Everything that one step produced for one server."""

    items: list[Delta]


class Stats(Message, frozen=True):
    """Exact state of the scheduler. Pushed as a heartbeat with query 0 to all, and on request.

    Pages and slots always add up: free + cached + in use = total.
    """

    query: int
    running: int
    waiting: int
    total_pages: int
    free_pages: int
    cached_pages: int  # held by the prefix cache and by no request: evictable
    total_slots: int
    free_slots: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    retracted: int  # times that a running request had to wait again for memory
    compiling: int = 0  # requests that wait for their grammar
    token_s: float = 0.0  # seconds of a prompt token at the speed of late; 0: not measured
    context_s: float = 0.0  # and for each token before it


class Profiled(Message, frozen=True):
    """What has come of a wish about profiles: a trace in `file`, or the reason why not."""

    query: int
    file: str = ""
    problem: str = ""


# -- server to server ---------------------------------------------------------------------------


class Ping(Message, frozen=True):
    """Answered at once: the sockets are connected both ways."""


class Meet(Message, frozen=True):
    """Asked of the first server; answered when all have come so far."""


class HasName(Message, frozen=True):
    """Whether a request by one of these names is running: 0 or 1."""

    names: list[str]


class AbortName(Message, frozen=True):
    """End the request of this name; answered by how many answers to it were running."""

    name: str


class AbortAll(Message, frozen=True):
    """End every request; answered by how many answers were running."""


class Drain(Message, frozen=True):
    """Begin nothing more; answered when nothing runs."""


class Stop(Message, frozen=True):
    """End what runs, for this reason, and exit."""

    reason: str


Question = Union[Ping, Meet, HasName, AbortName, AbortAll, Drain, Stop]  # noqa: UP007 (msgspec)


class Asked(Message, frozen=True):
    """A question of server `sender`, which goes by this number there."""

    sender: int
    query: int
    question: Question


class Answered(Message, frozen=True):
    query: int
    value: int


ToScheduler = Union[  # noqa: UP007 (msgspec)
    Generate, Abort, GetStats, FlushCache, StartProfile, StopProfile, Shutdown
]
ToServer = Union[Ready, Deltas, Stats, Profiled]  # noqa: UP007 (msgspec)
ToPeer = Union[Asked, Answered]  # noqa: UP007 (msgspec)
