"""The nouns that every part of a worker speaks.

A `StepPlan` is what the scheduler asks of the engine, a `StepResult` what it gets back. Both are
plain host data and never change once made: in the overlap loop two steps are alive at a time, and
what one of them reads must not be altered by planning the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

import msgspec
import numpy as np

# The launched forward pass of a step: its logits on the device. Only its engine can read it.
ForwardOutput = TypeVar("ForwardOutput")


class FinishReason(str, Enum):
    """Why a request ended, in OpenAI's words where it has one."""

    STOP = "stop"  # an EOS or stop token, or a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client left or asked for it
    ERROR = "error"  # it could not be computed
    LOST = "lost"  # something that it needs has gone here; elsewhere it can be computed
    REFUSED = "refused"  # the request itself is at fault


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the tokens of one request are drawn. Checked at the HTTP border, trusted here.

    What is drawn is a function of these and of the request's own tokens: it does not depend on what
    else is in the batch. The defaults are off.
    """

    max_tokens: int
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # least probability, as a share of the most likely token's
    seed: int = 0
    repetition_penalty: float = 1.0  # of tokens in prompt or output (CTRL, arXiv:1909.05858)
    frequency_penalty: float = 0.0  # times the occurrences in the output
    presence_penalty: float = 0.0  # of tokens that occur in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    min_tokens: int = 0  # until then, no token of `stop_token_ids` can be drawn
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False  # of the sampled tokens
    top_logprobs: int = 0  # number of most likely tokens beside each token with a logprob
    prompt_logprobs_from: int | None = None  # first prompt token whose logprob is wanted
    # If not empty, the tokens that can be drawn: bit t % 8 of byte t // 8 is token t.
    allowed: bytes = b""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Logits depend on the tokens so far, all of them."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that takes a slot: its first chunk is in this step.

    `output` is empty unless the request had begun before: it was retracted, or its stream broke on
    another worker. Both sequences stay as they are until the step is settled.
    """

    slot: int
    sampling: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A run of known tokens of one request: positions start .. start + len(tokens) - 1.

    If logprobs of prompt tokens are wanted, the row `logprob_start + i` of this chunk predicts
    `logprob_tokens[i]`.
    """

    slot: int
    start: int  # tokens of the request that the KV cache holds before this step
    tokens: tuple[int, ...]
    is_last: bool  # all that is known ends here, so this step samples the next token
    logprob_start: int = 0
    logprob_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward step. Its rows are the decode rows first, then the chunks, in this order.

    A decode row's input token is not here: it is the one that the previous step sampled, and it
    never leaves the device (`engine/slots.py`).
    """

    decode_slots: tuple[int, ...]
    decode_lengths: tuple[int, ...]  # tokens in the cache including the one this step adds
    chunks: tuple[PrefillChunk, ...]
    page_writes: tuple[tuple[int, int, int], ...]  # (slot, index in its page table, page)
    admitted: tuple[Admitted, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def sampled_slots(self) -> tuple[int, ...]:
        """Slots that get a token from this step, in the order of `StepResult.tokens`."""
        return self.decode_slots + tuple(chunk.slot for chunk in self.chunks if chunk.is_last)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some of a step's sampled rows may draw; the other rows may draw any."""

    rows: tuple[int, ...]  # indices into `StepPlan.sampled_slots`, ascending
    bits: np.ndarray  # [len(rows), ceil(vocab / 32)] int32; bit t % 32 of word t // 32 is token t


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities (natural) of a run of tokens, and of the likeliest in their places."""

    logprobs: list[float] = []
    top_ids: list[list[int]] = []  # one list a token, most likely first; empty if none are wanted
    top_logprobs: list[list[float]] = []


# In `StepResult.tokens`: the row had no token to draw, because its logits were not numbers or its
# mask allowed none.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, aligned with `StepPlan.sampled_slots`."""

    tokens: list[int]
    logprobs: list[Logprobs | None] | None = None  # of each row's token; None if no row has them
    prompt_logprobs: list[Logprobs | None] | None = None  # aligned with `StepPlan.chunks`
    seconds: float | None = None  # that the device was busy with it; None: not measured


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds that steps of an engine took at start-up."""

    single: float  # of one token
    tokens: int  # of a chunk
    chunk: float
    prefix: int
    single_behind_prefix: float  # of one token behind `prefix` others
    chunk_behind_prefix: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine found room for at start-up."""

    num_pages: int  # usable pages; page 0 is not among them, it takes writes nobody reads
    page_size: int  # tokens a page
    num_slots: int  # requests that can be in a batch
    context_length: int  # tokens of one request, prompt and output

    @property
    def max_total_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def pages_per_request(self) -> int:
        return -(-self.context_length // self.page_size)


class PendingStep(Protocol):
    """A step whose tokens are still being computed or copied to the host."""

    def wait(self) -> StepResult:
        """Block until the tokens are on the host."""
        ...


class StepEngine(Protocol[ForwardOutput]):
    """What the scheduler needs of the device: launch the two halves of a step.

    Sampling is apart from the forward pass so that everything the host learns from the step before
    can be settled in between, while the device is busy. Neither call waits for the device.
    """

    @property
    def capacity(self) -> Capacity: ...

    def forward(self, plan: StepPlan) -> ForwardOutput: ...

    def sample(
        self, forward_output: ForwardOutput, masks: TokenMasks | None = None
    ) -> PendingStep: ...

    def is_usable_after(self, error: Exception) -> bool:
        """Whether other steps may work after `error` came out of one."""
        ...
