"""A request inside the scheduler: its state, its tokens, its slot and its pages.

    ENCODING --images--> COMPILING or WAITING

    COMPILING --grammar--> WAITING --admit--> PREFILL --last chunk launched--> DECODE
        |                   | ^                  | ^                            |
        |                   | |                  | `---------- jump ------------|
        |                   | `------------------+---------- retract -----------|
        `-------------------`--------------------+---------- finish ------------+--> FINISHED

A request without images starts as COMPILING, and without a grammar as WAITING. A request is retracted when others need its
memory: it waits again, and later computes again the tokens that are no longer in the prefix cache, its output included. A
request jumps when its grammar forces several tokens: they are computed like tokens of a prompt. A finish (EOS, length,
abort, error) is legal in every live state and takes effect at once: the tokens of up to two launched steps for the request
are dropped.

A retraction or a finish frees slot and pages at once, because the device runs all work in order: the step of the next
owner is launched later (`worker/engine/slots.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto

from mla_router.worker.generation import FinishReason, Logprobs, SamplingParams
from mla_router.worker.images import PlacedImage
from mla_router.worker.messages import Grammar
from mla_router.worker.scheduler.radix_cache import Node
from mla_router.worker.step.plan import ImageRows, PrefillChunk, StepPlan


class State(Enum):
    ENCODING = auto()
    COMPILING = auto()
    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


_NEXT = {
    State.ENCODING: {State.COMPILING, State.WAITING, State.FINISHED},
    State.COMPILING: {State.WAITING, State.FINISHED},
    State.WAITING: {State.PREFILL, State.FINISHED},
    State.PREFILL: {State.DECODE, State.WAITING, State.FINISHED},
    State.DECODE: {State.PREFILL, State.WAITING, State.FINISHED},
    State.FINISHED: set[State](),
}


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Counts tokens twice: those in launched steps, and those whose results are known."""

    rid: str
    model_prompt: list[int]
    sampling: SamplingParams
    _: KW_ONLY
    output: list[int] = field(default_factory=list)
    cache_salt: str = ""
    priority: int = 0
    arrival: int = 0  # sequence number: smaller is older
    grammar: Grammar | None = None
    server: int = 0  # number of the server process that sent it
    images: Sequence[PlacedImage] = ()
    tokens_per_row: int = 1  # maximum number of tokens of one decode step
    prediction: Sequence[int] = ()

    # The state of the request; no arguments
    prompt: list[int] = field(init=False)  # for prefix caches: with the keys of images
    context: list[int] = field(init=False)  # all tokens that are known before it runs
    max_tokens: int = field(init=False)
    state: State = field(init=False)
    finish_reason: FinishReason | None = None
    accepted: int = 0  # drafts

    launched_prompt: int = 0  # context tokens that are cached or in launched steps
    launched_outputs: int = 0  # upper bound of the output tokens after the launched steps
    least_outputs: int = 0  # the same, if they accept no draft
    computed_length: int = 0  # tokens whose KV cache is computed

    # Those of prompt[prompt_logprobs_from:] so far; None: it has none
    prompt_logprobs: Logprobs | None = field(init=False)
    # Prompt tokens before this index have their logprob or need none. The first token never has one.
    logprobs_until: int = field(init=False)

    slot: int = -1
    pages: list[int] = field(default_factory=list)
    allocated_tokens: int = 0  # capacity of its pages
    first_read: int = 0  # index of its first page whose window page it reads (`window_pages.py`)
    tree_pages: int = 0  # leading pages that belong to the prefix cache
    node: Node | None = None  # the last node of its tree pages, locked by this request
    prefix_pages: tuple[int, ...] | None = None  # cached `prefix_key`
    num_cached: int = 0  # context tokens found in the prefix cache at its first admission
    was_retracted: bool = False
    is_jumping: bool = False  # in prefill after a jump: its grammar has forced several tokens
    first_delta_sent: bool = False

    arrived_at: float = field(default_factory=time.monotonic)
    queue_seconds: float = 0.0  # from its arrival to its first admission
    has_passed: bool = False  # it was admitted while an older request waited for memory
    overtaken: int = 0  # later requests that were admitted before it
    cached_at: int = -1  # version of the prefix cache at the last look-up of `cached_tokens`
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        prompt, wanted = self.model_prompt, self.sampling.prompt_logprobs_from
        self.prompt = _with_keys(prompt, self.images) if self.images else prompt
        self.output = list(self.output)
        self.context = self.prompt + self.output
        self.max_tokens = self.sampling.max_tokens
        self.state = self.first_state
        self.prompt_logprobs = None if wanted is None else Logprobs()
        self.logprobs_until = len(prompt) if wanted is None else min(max(1, wanted), len(prompt))

    def __repr__(self) -> str:
        return f"Request({self.rid}, {self.state.name}, {len(self.prompt)}+{len(self.output)})"

    @property
    def has_started_answer(self) -> bool:
        """Whether its client may have tokens: the request was retracted, or another worker began its answer."""
        return self.was_retracted or len(self.context) > len(self.prompt)

    @property
    def first_state(self) -> State:
        if self.images:
            return State.ENCODING
        return State.WAITING if self.grammar is None else State.COMPILING

    @property
    def is_planned(self) -> bool:
        """Whether the planner has it: it waits for neither its images nor its grammar."""
        return self.state not in (State.ENCODING, State.COMPILING)

    def move_to(self, state: State) -> None:
        assert state in _NEXT[self.state], f"{self!r} cannot become {state.name}"
        self.state = state

    def finish(self, reason: FinishReason) -> None:
        self.move_to(State.FINISHED)
        self.finish_reason = reason

    def retract(self) -> None:
        """Returns to WAITING. The token of a step in flight still arrives by `add_token`."""
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
        """Sort key of the claim to memory, strongest first."""
        return -self.priority, self.arrival

    def prefix_key(self) -> tuple[int, ...]:
        """Returns a sort key by which requests with common first pages are adjacent: its pages 0, 1, 3, 7 and so on."""
        if self.prefix_pages is None:
            self.prefix_pages = tuple(
                [self.pages[(1 << k) - 1] for k in range(len(self.pages).bit_length())]
            )
        return self.prefix_pages

    @property
    def is_live(self) -> bool:
        return self.finish_reason is None

    @property
    def is_prompt_computed(self) -> bool:
        """Whether its whole context is computed, or it does not run any more."""
        return self.slot < 0 or self.computed_length >= len(self.context)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in its KV cache: the last sampled token is never written."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def max_cached(self) -> int:
        """Maximum number of leading context tokens that may come from the prefix cache. The others must be computed:
        they predict the first output token and the prompt tokens with logprobs."""
        first_row = (
            self.logprobs_until - 1
            if self.logprobs_until < len(self.prompt)
            else len(self.context) - 1
        )
        return min(first_row, len(self.context) - 1)

    @property
    def wants_decode(self) -> bool:
        """Whether the next step has a decode row for it. A finish by length is known before its token, so
        without drafts no step is launched past it. With drafts one may be, whose rows are then idle (`decode_bound`)."""
        return self.state is State.DECODE and self.least_outputs < self.max_tokens

    @property
    def takes_drafts(self) -> bool:
        return self.tokens_per_row > 1

    def draft_bound(self, bound: int) -> int:
        """Returns the number of tokens for which it needs pages in a step that leaves at most `bound` tokens in the KV
        cache. The drafter writes all drafts of that step but the last to its own KV cache, on the same pages."""
        return min(bound + self.tokens_per_row - 2, self.max_length) if self.takes_drafts else bound

    def decode_bound(self, tokens: int) -> int:
        """Returns an upper bound of its tokens in the KV cache after its next decode step, which gives at most `tokens`
        tokens: the last token is not in it."""
        outputs = self.launched_outputs + tokens
        if outputs > self.max_tokens:  # noqa: PLR1730 (`min` takes longer)
            outputs = self.max_tokens
        return len(self.prompt) + outputs - 1

    def tokens_in(self, plan: StepPlan) -> int:
        """Returns the maximum number of tokens of its decode slot in a step."""
        return min(self.tokens_per_row, plan.tokens_per_decode)

    def take_decode(self, tokens: int) -> int:
        """Counts one decode step of at most `tokens` tokens as launched. Returns its `decode_bound`."""
        bound = self.decode_bound(tokens)
        self.launched_outputs += tokens
        self.least_outputs += 1
        return bound

    def take_chunk(self, budget: int) -> PrefillChunk:
        """Returns the next chunk of the context, at most `budget` tokens, and counts it as launched."""
        start = self.launched_prompt
        end = min(len(self.context), start + budget)
        assert start < end, f"{self!r} has nothing to prefill with {budget=}"
        self.launched_prompt = end
        is_last = end == len(self.context)
        if is_last:
            self.move_to(State.DECODE)
            self.is_jumping = False
            self.launched_outputs = len(self.context) - len(self.prompt) + 1
            self.least_outputs = self.launched_outputs
        first = max(start + 1, self.logprobs_until)  # a row predicts the token after its own
        logprob_tokens = tuple(self.model_prompt[first : end + 1])
        tokens = self.context[start:end]
        if self.images:
            own = self.model_prompt[start:end]
            tokens = own + tokens[len(own) :]
        return PrefillChunk(
            self.slot,
            start,
            tuple(tokens),
            is_last,
            logprob_start=first - 1 - start if logprob_tokens else 0,
            logprob_tokens=logprob_tokens,
            images=self._image_rows(start, end) if self.images else (),
        )

    def _image_rows(self, start: int, end: int) -> tuple[ImageRows, ...]:
        """Returns the rows of images in a chunk from position `start` to `end`."""
        rows = []
        for placed in self.images:
            info = placed.image.info
            first = max(start, placed.start)
            count = min(end, placed.start + info.num_tokens) - first
            if count > 0:
                rows.append(ImageRows(first - start, info.key, first - placed.start, count))
        return tuple(rows)

    def add_prompt_logprobs(self, chunk: PrefillChunk, logprobs: Logprobs | None) -> None:
        """Adds the logprobs of prompt tokens from a computed chunk."""
        if not chunk.logprob_tokens:
            return
        assert logprobs is not None and self.prompt_logprobs is not None, f"{self!r} {chunk!r}"
        self.prompt_logprobs.logprobs.extend(logprobs.logprobs)
        self.prompt_logprobs.top_ids.extend(logprobs.top_ids)
        self.prompt_logprobs.top_logprobs.extend(logprobs.top_logprobs)
        self.logprobs_until += len(chunk.logprob_tokens)

    @property
    def may_jump(self) -> bool:
        """Whether it may jump. Logprobs and penalties need a step for each token."""
        return not self.sampling.logprobs and not self.sampling.penalized

    def jump(self, run: list[int]) -> list[int]:
        """Appends the forced tokens `run` to the context, and returns all but the first, which the step that has just
        been sampled gives. At most max_tokens are taken."""
        assert self.launched_outputs == len(self.output) + 1, f"{self!r} has tokens in flight"
        run = run[: self.max_tokens - len(self.output)]
        if len(self.output) + len(run) == self.max_tokens:
            self.launched_outputs = self.least_outputs = self.max_tokens
        elif len(run) > 1:
            self.launched_prompt = len(self.prompt) + len(self.output)
            self.context += self.output[len(self.context) - len(self.prompt) :] + run
            self.move_to(State.PREFILL)
            self.is_jumping = True
        return run[1:]


def _with_keys(prompt: list[int], images: Sequence[PlacedImage]) -> list[int]:
    """Returns `prompt` with the keys of images in place of their placeholders, so that prefix caches tell images apart."""
    tokens = list(prompt)
    for placed in images:
        key, count = placed.image.info.key, placed.image.info.num_tokens
        tokens[placed.start : placed.start + count] = [key] * count
    return tokens
