"""Messages between the server processes and the scheduler of one worker.

They are msgspec structs in msgpack over ZMQ PUSH/PULL on ipc sockets: decoding builds only these types. Server processes
are numbered; `server` is the number of the process that gets the reply.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Union

import msgspec

from mla_router.worker.generation import Logprobs, SamplingParams
from mla_router.worker.images import ImageFormat, PlacedImage


def scheduler_socket(folder: Path | str) -> str:
    """Returns the address of the socket in `folder` on which the scheduler receives."""
    return f"ipc://{folder}/to_scheduler"


def server_socket(folder: Path | str, server: int) -> str:
    """Returns the address of the socket in `folder` on which server process `server` receives."""
    return f"ipc://{folder}/to_server_{server}"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A message is a tagged array: field names are not sent."""


# -- server to scheduler ------------------------------------------------------------------------


class Grammar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The grammar that the output must follow."""

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    # The JSON schema {} allows any JSON. A json_schema format within a structural tag may have the key `field`, the name
    # that the reason of its refusal begins with.
    source: str


class Generate(Message, frozen=True):
    """Generates tokens after `prompt` and `output`, until there are `max_tokens` tokens of output.

    `output` is not empty if the request continues an answer of another worker: its tokens count as generated and are
    not sent again.
    """

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    output: list[int] = []
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    priority: int = 0  # higher priorities come first, with --enable-priority-scheduling
    grammar: Grammar | None = None
    server: int = 0
    images: list[PlacedImage] = []  # in order
    prediction: list[int] = []  # the answer that the client expects; at most MAX_PREDICTION tokens


class Abort(Message, frozen=True):
    """Ends a request at once, in any state. An unknown id is ignored: the request may just have finished."""

    rid: str


class GetStats(Message, frozen=True):
    """Requests the scheduler's statistics; the reply is `Stats` with the same `query`."""

    query: int
    server: int = 0


class FlushCache(Message, frozen=True):
    """Evicts every cached prefix that no running request uses; the reply is `Stats`."""

    query: int
    server: int = 0


class StartProfile(Message, frozen=True):
    """Starts a trace of the next steps; the reply is `Recorded`."""

    query: int
    num_steps: int
    server: int = 0


class StopProfile(Message, frozen=True):
    """Stops and writes the trace; the reply is `Recorded`."""

    query: int
    server: int = 0


class RecordExperts(Message, frozen=True):
    """Starts or stops a record of the load of experts, or writes it to a file; the reply is `Recorded`."""

    query: int
    action: Literal["start", "stop", "dump"]
    server: int = 0


class Shutdown(Message, frozen=True):
    """Ends the step loop and the process."""


# -- scheduler to server ------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """Sent once to each server: the model is loaded, and requests may follow."""

    max_total_num_tokens: int
    page_size: int
    max_running_requests: int
    context_length: int
    vocab_size: int
    device: str
    dtype: str
    kv_cache_dtype: str
    attention_backend: str
    images: ImageFormat | None = None  # None: the model takes none


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one request.

    The first delta of a request has `cached_tokens` and, if requested, `prompt_logprobs`. `finish_reason` is a
    `FinishReason` value, or empty before the last delta. `error` is the message if it is "error", "lost" or "refused".
    """

    rid: str
    token_ids: list[int]
    logprobs: Logprobs | None = None  # of token_ids
    cached_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    prompt_logprobs: Logprobs | None = None
    # In the first delta: from the request's arrival to its first admission
    queue_seconds: float = 0.0
    accepted: int = 0  # drafts of this request that were accepted so far


class Deltas(Message, frozen=True):
    """All new output of one step for one server."""

    items: list[Delta]


class Stats(Message, frozen=True):
    """The scheduler's statistics: sent to all servers as a heartbeat with query 0, and as a reply.

    Pages and slots add up: free + cached + in use = total.
    """

    query: int
    running: int
    waiting: int
    total_pages: int
    free_pages: int
    cached_pages: int  # owned by the prefix cache and not used by a request: evictable
    total_slots: int
    free_slots: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    retracted: int  # retractions so far
    compiling: int = 0  # requests whose grammar is being compiled
    token_s: float = 0.0  # seconds of a prompt token at the current speed; 0: not measured
    context_s: float = 0.0  # further seconds of a prompt token for each token before it
    expert_balancedness: float = 0.0  # mean load of a rank's experts over the largest; 0: unknown
    draft_steps: int = 0  # decode steps of requests that verified drafts
    draft_tokens: int = 0  # drafts in them; of a tree all nodes after its root
    accepted_tokens: int = 0  # accepted ones
    # Of all steps, from the end of the step before, or the later launch, to the results
    step_seconds: float = 0.0
    wait_seconds: float = 0.0  # in which the scheduler waited for these results

    @property
    def accept_length(self) -> float:
        """Tokens of a request in a step with drafts; 0: there was none."""
        return 1 + self.accepted_tokens / self.draft_steps if self.draft_steps else 0.0


class Recorded(Message, frozen=True):
    """Reply to `StartProfile`, `StopProfile` and `RecordExperts`: the `file`, if one was written, or a `problem`. `failed`: it
    is a fault of this worker, such as a full disk; else nothing can be recorded or written now."""

    query: int
    file: str = ""
    problem: str = ""
    failed: bool = False


# -- server to server ---------------------------------------------------------------------------


class Ping(Message, frozen=True):
    """Gets a reply at once, which shows that the sockets are connected both ways."""


class Barrier(Message, frozen=True):
    """Sent to the first server process, which replies once it has the barrier of every process."""


class HasName(Message, frozen=True):
    """Asks whether a request of one of these names is running. The reply is 0 or 1."""

    names: list[str]


class AbortName(Message, frozen=True):
    """Ends the request of this name. The reply is the number of its answers that were running."""

    name: str


class AbortAll(Message, frozen=True):
    """Ends every request. The reply is the number of answers that were running."""


class Drain(Message, frozen=True):
    """Refuses new requests from now on. The reply comes when no request is running."""


class Stop(Message, frozen=True):
    """Ends all requests with `reason`, and the process."""

    reason: str


PeerQuery = Union[Ping, Barrier, HasName, AbortName, AbortAll, Drain, Stop]  # noqa: UP007 (msgspec)


class PeerRequest(Message, frozen=True):
    """A query of server process `sender`, which numbers its queries."""

    sender: int
    query: int
    question: PeerQuery


class PeerReply(Message, frozen=True):
    query: int
    value: int


ToScheduler = Union[  # noqa: UP007 (msgspec)
    Generate, Abort, GetStats, FlushCache, StartProfile, StopProfile, RecordExperts, Shutdown
]
ToServer = Union[Ready, Deltas, Stats, Recorded]  # noqa: UP007 (msgspec)
ToPeer = Union[PeerRequest, PeerReply]  # noqa: UP007 (msgspec)
