"""An engine without a model: it keeps real pages and samples a hash of the tokens that it reads from them.

A token that is lost, written to a wrong page or read through a stale page table changes all later tokens, so equal
outputs mean equal caches. Like a device it works asynchronously: it computes a step when the host waits for its result,
or when the next step is launched.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from mla_router.worker.generation import Logprobs
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import PrefillChunk, StepPlan, TokenMasks
from mla_router.worker.step.result import NO_TOKEN, StepResult

VOCAB = 50
WRONG = -7  # the token of a draft that is not accepted


def next_token(history: list[int], seed: int, allowed: Sequence[int] = range(VOCAB)) -> int:
    """Returns the next token of the model: a hash of all earlier tokens."""
    state = seed + 17
    for token in history:
        state = (state * 1103515245 + token + 12345) % (1 << 31)
    return allowed[(state >> 8) % len(allowed)] if allowed else NO_TOKEN


def continuation(
    prompt: list[int],
    count: int,
    seed: int = 0,
    stops: Collection[int] = (),
    output: Sequence[int] = (),
) -> list[int]:
    """Returns at most `count` tokens after `prompt` and `output`, computed without cache and
    scheduler."""
    history = [*prompt, *output]
    begin = len(history)
    for _ in range(count):
        history.append(next_token(history, seed))
        if history[-1] in stops:
            break
    return history[begin:]


def logprob(history: list[int], token: int) -> float:
    """Returns the logprob of `token` after `history`."""
    return -1.0 - next_token([*history, token], 1)


@dataclass
class FakeStep:
    engine: FakeEngine
    plan: StepPlan
    inputs: list[tuple[int, int, int]] = field(default_factory=list)  # slot, position, token
    result: StepResult | None = None
    # By index into the plan's sampled slots: tokens that each bitmask allows
    allowed: dict[int, list[list[int]]] = field(default_factory=dict)
    made: list[list[int]] = field(default_factory=list)  # drafts

    def wait(self) -> StepResult:
        self.engine.run_until(self)
        assert self.result is not None
        return self.result

    def drafts(self) -> list[list[int]]:
        assert self.plan.returns_drafts and self.result is not None
        return self.made


class FakeEngine:
    """Implements `StepEngine`. Each cache location keeps its token.

    With window pages the last tokens before each row are read from these, and the others from the pages.

    A decode row gives up to `capacity.tokens_per_row` tokens, and `count` says how many. As with drafts, it writes a wrong
    token to each further location for which the row has room. With bitmasks it gives as many as its drafts and its bitmasks
    say: some of the drafts are wrong, and they know no bitmask.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        entries = capacity.pages_per_request * capacity.page_kinds
        self.page_table = [[0] * entries for _ in range(capacity.num_slots)]
        self.cache: dict[int, int] = {}
        self.last_token = [0] * capacity.num_slots
        self.lengths = [0] * capacity.num_slots  # known tokens, the last one included
        self.seeds = [0] * capacity.num_slots
        self.launched: list[FakeStep] = []
        self.sampled = 0
        self.drafts = [[WRONG] * capacity.num_drafts for _ in range(capacity.num_slots)]
        self._draw = random.Random(0)
        self._draw_wrong = random.Random(0)

    def count(self) -> int:
        """Returns the number of tokens that a decode row would give."""
        most = self.capacity.tokens_per_row
        return self._draw.randint(0, most) if most > 1 else 1

    def forward(self, plan: StepPlan) -> FakeStep:
        assert plan.num_tokens > 0 or plan.group is not None
        assert len(set(plan.sampled_slots)) == len(plan.sampled_slots), "a slot is sampled twice"
        step = FakeStep(self, plan)
        self.launched.append(step)
        return step

    def sample(self, step: FakeStep, masks: TokenMasks | None = None) -> FakeStep:
        if masks is not None:
            bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
            tokens = [np.flatnonzero(some).tolist() for some in bits]
            counts = masks.counts_of_rows
            assert sum(counts) == len(tokens)
            ends = list(accumulate(counts))
            step.allowed = {
                row: tokens[end - count : end]
                for row, count, end in zip(masks.rows, counts, ends, strict=True)
            }
        self.sampled += 1
        return step

    def is_usable_after(self, error: Exception) -> bool:
        raise AssertionError("this engine does not fail") from error

    def run_until(self, last: FakeStep) -> None:
        while last.result is None:
            self._run(self.launched.pop(0))

    def _run(self, step: FakeStep) -> None:
        plan = step.plan
        for slot, index, page in plan.page_writes:
            assert 1 <= page <= self.capacity.num_pages
            self.page_table[slot][index] = page
        for request in plan.admitted:
            self.seeds[request.slot] = request.sampling.seed
        most = plan.rows_per_decode
        counts = []
        for row, (slot, bound) in enumerate(
            zip(plan.decode_slots, plan.decode_bounds, strict=True)
        ):
            length = self.lengths[slot]
            exact = self.capacity.tokens_per_row == 1
            # A row behind an answer that its drafts have ended is idle
            assert length == bound if exact else length <= bound + 1, f"{length} tokens, {bound=}"
            if length > bound:
                counts.append(0)
                continue
            self._write(slot, length - 1, self.last_token[slot])
            for position in range(length, min(length + most - 1, bound)):
                self._write(slot, position, WRONG)
            drawn = min(self.count(), most, bound - length + 1)
            if row in step.allowed:
                drawn = min(len(step.allowed[row]), bound - length + 1)
            counts.append(1 if most == 1 else drawn)
        for chunk in plan.chunks:
            # Its first token attends to itself as well
            before = self._history(chunk.slot, chunk.start, (self.capacity.window or 1) - 1)
            assert before == self._everywhere(chunk.slot, chunk.start), f"{before=} {chunk=}"
            for i, token in enumerate(chunk.tokens):
                self._write(chunk.slot, chunk.start + i, token)
            self.lengths[chunk.slot] = chunk.start + len(chunk.tokens)
            counts += [1] * chunk.is_last
        tokens = []
        for row, (slot, count) in enumerate(zip(plan.sampled_slots, counts, strict=True)):
            tokens.append(self._tokens(slot, count, step.allowed.get(row)))
            if plan.draft_bounds:
                step.made.append(self._make_drafts(slot))
        logprobs: list[Logprobs | None] = [
            Logprobs([-float(token) for token in some]) for some in tokens
        ]
        step.result = StepResult(tokens, logprobs, [self._prompt_logprobs(c) for c in plan.chunks])

    def _make_drafts(self, slot: int) -> list[int]:
        """Returns what would follow without bitmasks, but for some wrong tokens."""
        last = self.lengths[slot] - 1
        known = [self.cache.get(self._location(slot, i), WRONG) for i in range(last)]
        following = continuation(
            [*known, self.last_token[slot]], self.capacity.num_drafts, self.seeds[slot]
        )
        wrong = [self._draw_wrong.random() < 0.2 for _ in following]
        self.drafts[slot] = [(t + w) % VOCAB for t, w in zip(following, wrong, strict=True)]
        return self.drafts[slot]

    def _tokens(
        self, slot: int, count: int, masks: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """Returns the next `count` tokens, or fewer if a draft of bitmasks is wrong, and advances the slot by them."""
        tokens: list[int] = []
        for rank in range(count):
            if masks is not None and tokens and tokens[-1] != self.drafts[slot][rank - 1]:
                break
            allowed = range(VOCAB) if masks is None else masks[rank]
            length = self.lengths[slot]
            if tokens:
                self._write(slot, length - 1, self.last_token[slot])
            history = self._history(slot, length)
            tokens.append(next_token(history, self.seeds[slot], allowed))
            self.last_token[slot] = max(tokens[-1], 0)
            self.lengths[slot] += 1
        return tokens

    def _prompt_logprobs(self, chunk: PrefillChunk) -> Logprobs | None:
        if not chunk.logprob_tokens:
            return None
        ends = range(chunk.start + chunk.logprob_start + 1, chunk.start + len(chunk.tokens) + 1)
        histories = [self._history(chunk.slot, end) for end in ends]
        pairs = zip(histories, chunk.logprob_tokens, strict=False)
        return Logprobs([logprob(history, token) for history, token in pairs])

    def _history(self, slot: int, length: int, window: int | None = None) -> list[int]:
        """Returns the first `length` tokens: the last `window` ones from window pages, if there are any."""
        window = self.capacity.window if window is None else window
        if self.capacity.window is None or window is None:
            return self._everywhere(slot, length)
        first = max(0, length - window)
        last = [
            self.cache.get(self._location(slot, i, own=True), WRONG) for i in range(first, length)
        ]
        return [*self._everywhere(slot, first), *last]

    def _everywhere(self, slot: int, length: int) -> list[int]:
        return [self.cache[self._location(slot, i)] for i in range(length)]

    def _location(self, slot: int, position: int, *, own: bool = False) -> int:
        """`own`: in the window pages."""
        size = self.capacity.page_size
        first = self.capacity.pages_per_request if own else 0
        return self.page_table[slot][first + position // size] * size + position % size

    def _write(self, slot: int, position: int, token: int) -> None:
        self.cache[self._location(slot, position)] = token
        if self.capacity.window is not None:
            self.cache[self._location(slot, position, own=True)] = token
