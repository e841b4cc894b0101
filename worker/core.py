"""The nouns that every part of a worker speaks.

A `StepPlan` is what the scheduler asks of the engine, a `StepResult` what it gets back. Both are
plain host data and never change once made: in the overlap loop two steps are alive at a time, and
what one of them reads must not be altered by planning the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

# A launched forward pass: the logits of a step on the device. Only its engine can read it.
Launched = TypeVar("Launched")


class FinishReason(str, Enum):
    """Why a request ended, in OpenAI's words where it has one."""

    STOP = "stop"  # an EOS or stop token, or a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client left or asked for it


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn. Checked at the HTTP border, trusted here.

    temperature 0 is greedy. top_k 0 and top_p 1 are off. `seed` fixes the random sequence of this
    request alone: it does not depend on what else is in the batch.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A run of prompt tokens of one request: positions start .. start + len(tokens) - 1."""

    slot: int
    start: int  # tokens of the request that the KV cache holds before this step
    tokens: tuple[int, ...]
    is_last: bool  # the prompt ends here, so this step samples the first output token


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
    admitted: tuple[tuple[int, SamplingParams], ...]  # slots that begin a new request here

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def sampled_slots(self) -> tuple[int, ...]:
        """Slots that get a token from this step, in the order of `StepResult.tokens`."""
        return self.decode_slots + tuple(chunk.slot for chunk in self.chunks if chunk.is_last)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, aligned with `StepPlan.sampled_slots`."""

    tokens: list[int]
    logprobs: list[float] | None  # of the sampled tokens, natural log; None if nobody asked


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


class StepEngine(Protocol[Launched]):
    """What the scheduler needs of the device: launch the two halves of a step.

    Sampling is apart from the forward pass so that everything the host learns from the step before
    can be settled in between, while the device is busy. Neither call waits for the device.
    """

    @property
    def capacity(self) -> Capacity: ...

    def forward(self, plan: StepPlan) -> Launched: ...

    def sample(self, launched: Launched) -> PendingStep: ...
