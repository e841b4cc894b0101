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

from mla_router.worker.generation import FinishReason, SamplingParams
from mla_router.worker.images import PlacedImage
from mla_router.worker.messages import Generate, Grammar
from mla_router.worker.scheduler.place import Place
from mla_router.worker.scheduler.placed_images import rows_between, with_keys
from mla_router.worker.scheduler.prompt_logprobs import PromptLogprobs
from mla_router.worker.step.plan import PrefillChunk, StepPlan


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

    message: Generate
    _: KW_ONLY
    arrival: int = 0  # sequence number: smaller is older
    priority: int = 0  # the message's priority; 0 if priorities are disabled
    tokens_per_row: int = 1  # maximum number of tokens of one decode step

    rid: str = field(init=False)
    sampling: SamplingParams = field(init=False)
    grammar: Grammar | None = field(init=False)
    images: Sequence[PlacedImage] = field(init=False)
    prompt: list[int] = field(init=False)  # for prefix caches: with the keys of images
    output: list[int] = field(init=False)
    context: list[int] = field(init=False)  # all tokens that are known before it runs
    max_tokens: int = field(init=False)

    state: State = field(init=False)
    finish_reason: FinishReason | None = None
    was_retracted: bool = False
    is_jumping: bool = False  # in prefill after a jump: its grammar has forced several tokens
    place: Place = field(default_factory=Place)

    launched_prompt: int = 0  # context tokens that are cached or in launched steps
    launched_outputs: int = 0  # upper bound of the output tokens after the launched steps
    least_outputs: int = 0  # the same, if they accept no draft
    computed_length: int = 0  # tokens whose KV cache is computed

    # What its deltas tell the server
    first_delta_sent: bool = False
    prompt_logprobs: PromptLogprobs | None = None  # None: not wanted, or sent
    num_cached: int = 0  # context tokens found in the prefix cache at its first admission
    queue_seconds: float = 0.0  # from its arrival to its first admission
    accepted: int = 0  # drafts

    arrived_at: float = field(default_factory=time.monotonic)
    overtaken: int = 0  # later requests that were admitted before it
    has_passed: bool = False  # it was admitted while an older request waited for memory
    cached_at: int = -1  # version of the prefix cache at the last look-up of `cached_tokens`
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        message = self.message
        self.rid, self.sampling = message.rid, message.sampling
        self.grammar, self.images = message.grammar, message.images
        self.prompt = with_keys(message.prompt, self.images) if self.images else message.prompt
        self.output = list(message.output)
        self.context = self.prompt + self.output
        self.max_tokens = self.sampling.max_tokens
        self.state = self.first_state
        if (first := self.sampling.prompt_logprobs_from) is not None:
            self.prompt_logprobs = PromptLogprobs(message.prompt, first)

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

    @property
    def is_running(self) -> bool:
        """Whether it has a slot."""
        return self.place.slot >= 0

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

    @property
    def is_live(self) -> bool:
        return self.finish_reason is None

    @property
    def is_context_computed(self) -> bool:
        """Whether its whole context is computed, or it does not run any more."""
        return not self.is_running or self.computed_length >= len(self.context)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in its KV cache: the last sampled token is never written."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def max_cached(self) -> int:
        """Maximum number of leading context tokens that may come from the prefix cache. The others must be computed:
        they predict the first output token and the prompt tokens with logprobs."""
        wanted = self.prompt_logprobs
        if wanted is None or wanted.is_complete:
            return len(self.context) - 1
        return wanted.next - 1

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

    def limit_decode(self, tokens: int) -> None:
        """Lowers the tokens of the launched decode step to `tokens`. The results of the steps before are known."""
        self.launched_outputs = len(self.output) + tokens

    def take_back(self, given: int, limit: int) -> None:
        """Corrects the count of outputs by a decode step which gave `given` of `limit` tokens."""
        self.launched_outputs += given - limit
        self.least_outputs += given - 1

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
        tokens = self.context[start:end]
        if self.images:  # the model gets placeholders, not keys
            own = self.message.prompt[start:end]
            tokens = own + tokens[len(own) :]
        wanted = self.prompt_logprobs
        logprob_start, logprob_tokens = wanted.in_chunk(start, end) if wanted else (0, ())
        return PrefillChunk(
            self.place.slot,
            start,
            tuple(tokens),
            is_last,
            logprob_start=logprob_start,
            logprob_tokens=logprob_tokens,
            images=rows_between(self.images, start, end) if self.images else (),
        )

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
