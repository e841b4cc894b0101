"""One request inside the scheduler: its state, its tokens and what it holds.

    COMPILING --grammar--> WAITING --admit--> PREFILL --last chunk launched--> DECODE
        |                   | ^                  | ^                            |
        |                   | |                  | `---------- jump ------------|
        |                   | `------------------+---------- retract -----------|
        `-------------------`--------------------+---------- finish ------------+--> FINISHED

A request without a grammar begins as WAITING. One is retracted when others need its memory: it
waits again, and later computes what is no longer in the prefix cache, its own output included. One
jumps when its grammar forces several tokens: they are computed as those of a prompt are. A finish
(EOS, length, abort, error) is legal in every live state, and takes effect at once: the overlap loop
has launched up to two steps that still name the request, and their tokens for it are dropped.
Either way its slot and pages are free at once, because the device does one thing after the other:
whoever gets them next is launched later (`worker/engine/slots.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum, auto

from mla_router.worker.core import FinishReason, Logprobs, PrefillChunk, SamplingParams
from mla_router.worker.messages import Grammar
from mla_router.worker.scheduler.radix_cache import Node


class State(Enum):
    COMPILING = auto()
    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


_NEXT = {
    State.COMPILING: {State.WAITING, State.FINISHED},
    State.WAITING: {State.PREFILL, State.FINISHED},
    State.PREFILL: {State.DECODE, State.WAITING, State.FINISHED},
    State.DECODE: {State.PREFILL, State.WAITING, State.FINISHED},
    State.FINISHED: set[State](),
}


class Request:
    """Counters come in pairs: what has been launched, and what is known to have happened."""

    __slots__ = (
        "arrival",
        "arrived_at",
        "branch",
        "cache_salt",
        "cached_at",
        "cached_tokens",
        "context",
        "finish_reason",
        "grammar",
        "has_passed",
        "held_tokens",
        "is_jumping",
        "is_known",
        "launched_outputs",
        "launched_prompt",
        "logprobs_until",
        "max_tokens",
        "node",
        "num_cached",
        "output",
        "overtaken",
        "pages",
        "priority",
        "prompt",
        "prompt_logprobs",
        "queue_seconds",
        "rid",
        "sampling",
        "server",
        "settled_length",
        "slot",
        "state",
        "tree_pages",
        "was_retracted",
    )

    def __init__(
        self,
        rid: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        output: Sequence[int] = (),
        cache_salt: str = "",
        priority: int = 0,
        arrival: int = 0,
        grammar: Grammar | None = None,
        server: int = 0,
    ) -> None:
        self.rid = rid
        self.prompt = prompt
        self.sampling = sampling
        self.max_tokens = sampling.max_tokens
        self.cache_salt = cache_salt
        self.priority = priority
        self.arrival = arrival  # its number, by which requests are told apart in age
        self.grammar = grammar
        self.server = server  # the server process that wants to know of it
        self.state = State.WAITING if grammar is None else State.COMPILING
        self.finish_reason: FinishReason | None = None
        self.output = list(output)
        self.context = prompt + self.output  # what is known before it runs

        self.launched_prompt = 0  # context tokens whose KV is cached or being computed
        self.launched_outputs = 0  # output tokens that launched steps sample
        self.settled_length = 0  # tokens whose KV is known to be in the pages

        wanted = sampling.prompt_logprobs_from
        self.prompt_logprobs = None if wanted is None else Logprobs()  # of prompt[wanted:], so far
        # Prompt tokens up to here have their logprob or need none. The first never has one.
        self.logprobs_until = len(prompt) if wanted is None else min(max(1, wanted), len(prompt))

        self.slot = -1
        self.pages: list[int] = []
        self.held_tokens = 0  # for which there is room in its pages
        self.tree_pages = 0  # leading pages that belong to the prefix cache
        self.node: Node | None = None  # locked by this request: where its tree pages end
        self.branch: tuple[int, ...] | None = None  # `place_in_tree`, once its prompt has its pages
        self.num_cached = 0  # context tokens that needed no computation when it first ran
        self.was_retracted = False
        self.is_jumping = False  # it was decoding, and more than one token of it is known
        self.is_known = False  # to the server: its first delta is out

        self.arrived_at = time.monotonic()
        self.queue_seconds = 0.0  # it waited until it was first admitted
        self.has_passed = False  # it was admitted while another one waited for memory
        self.overtaken = 0  # by requests that came later and were admitted before it
        self.cached_at = -1  # version of the prefix cache in which `cached_tokens` was looked up
        self.cached_tokens = 0

    def __repr__(self) -> str:
        return f"Request({self.rid}, {self.state.name}, {len(self.prompt)}+{len(self.output)})"

    @property
    def has_begun(self) -> bool:
        """Its client may have tokens of it: it ran and was retracted, or comes from a worker that broke."""
        return self.was_retracted or len(self.context) > len(self.prompt)

    def move_to(self, state: State) -> None:
        assert state in _NEXT[self.state], f"{self!r} cannot become {state.name}"
        self.state = state

    def finish(self, reason: FinishReason) -> None:
        self.move_to(State.FINISHED)
        self.finish_reason = reason

    def retract(self) -> None:
        """Forget what was launched; a token that is still under way comes by `add_token`."""
        self.move_to(State.WAITING)
        self.context = self.prompt + self.output
        self.was_retracted = True
        self.is_jumping = False

    def add_token(self, token: int) -> None:
        self.output.append(token)
        if self.state is State.WAITING:
            self.context.append(token)

    @property
    def seniority(self) -> tuple[int, int]:
        """Sorts requests by their claim to memory, strongest first."""
        return -self.priority, self.arrival

    @property
    def is_live(self) -> bool:
        return self.finish_reason is None

    @property
    def is_prompt_settled(self) -> bool:
        """Nothing more will come of its context: all is computed, or it does not run any more."""
        return self.slot < 0 or self.settled_length >= len(self.context)

    @property
    def max_length(self) -> int:
        """Tokens that can ever be in its KV cache: the last sampled one never gets there."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def max_cached(self) -> int:
        """Leading context tokens that may come from the prefix cache. The others are computed for
        what they predict: the first output token, and prompt tokens whose logprob is wanted."""
        first_row = (
            self.logprobs_until - 1
            if self.logprobs_until < len(self.prompt)
            else len(self.context) - 1
        )
        return min(first_row, len(self.context) - 1)

    @property
    def wants_decode(self) -> bool:
        """A finish by length is known before its token is: no step is launched past it."""
        return self.state is State.DECODE and self.launched_outputs < self.max_tokens

    @property
    def next_decode_length(self) -> int:
        """Tokens in the cache once the next decode step has added its own."""
        return len(self.prompt) + self.launched_outputs

    def take_chunk(self, budget: int) -> PrefillChunk:
        """The next run of the context, at most `budget` tokens; counts it as launched."""
        start = self.launched_prompt
        end = min(len(self.context), start + budget)
        assert start < end, f"{self!r} has nothing to prefill with {budget=}"
        self.launched_prompt = end
        is_last = end == len(self.context)
        if is_last:
            self.move_to(State.DECODE)
            self.is_jumping = False
            self.launched_outputs = len(self.context) - len(self.prompt) + 1
        first = max(start + 1, self.logprobs_until)  # a row predicts the token after its own
        logprob_tokens = tuple(self.prompt[first : end + 1])
        return PrefillChunk(
            self.slot,
            start,
            tuple(self.context[start:end]),
            is_last,
            logprob_start=first - 1 - start if logprob_tokens else 0,
            logprob_tokens=logprob_tokens,
        )

    @property
    def may_jump(self) -> bool:
        """Nothing is wanted of its tokens that only a step each brings: logprobs, counts of them."""
        return not self.sampling.logprobs and not self.sampling.penalized

    def jump(self, run: list[int]) -> list[int]:
        """The step that has just been sampled gives run[0], and the others follow it: what is known
        goes on to their end, unless the answer ends there. Returns them."""
        assert self.launched_outputs == len(self.output) + 1, f"{self!r} has tokens under way"
        run = run[: self.max_tokens - len(self.output)]
        if len(self.output) + len(run) == self.max_tokens:
            self.launched_outputs = self.max_tokens
        elif len(run) > 1:
            self.launched_prompt = len(self.prompt) + len(self.output)
            self.context += self.output[len(self.context) - len(self.prompt) :] + run
            self.move_to(State.PREFILL)
            self.is_jumping = True
        return run[1:]

    def place_in_tree(self) -> tuple[int, ...]:
        """Sorts decoding requests by their first pages: some of its pages, twice as far from each other every time."""
        if self.branch is None:
            self.branch = tuple(
                [self.pages[(1 << k) - 1] for k in range(len(self.pages).bit_length())]
            )
        return self.branch

    def take_decode(self) -> int:
        """Count one decode step as launched; returns the cache length it brings."""
        length = self.next_decode_length
        self.launched_outputs += 1
        return length

    def add_prompt_logprobs(self, chunk: PrefillChunk, logprobs: Logprobs | None) -> None:
        """Take in what a settled chunk says about the prompt."""
        if not chunk.logprob_tokens:
            return
        assert logprobs is not None and self.prompt_logprobs is not None, f"{self!r} {chunk!r}"
        self.prompt_logprobs.logprobs.extend(logprobs.logprobs)
        self.prompt_logprobs.top_ids.extend(logprobs.top_ids)
        self.prompt_logprobs.top_logprobs.extend(logprobs.top_logprobs)
        self.logprobs_until += len(chunk.logprob_tokens)
