"""How long prompt tokens take on this device, and so how many of them a step may have.

A step keeps everybody waiting: running streams for their next token, new requests for their turn. So it
should take no longer than `TARGET_S`, whatever the device is. The time of a chunk of n tokens behind a
prefix of p is taken to be

    n * token_s  +  n * (p + n / 2) * context_s  +  p * prefix_s

where the last term is for keys and values, which latents are expanded to once a chunk. The constants are
measured at start-up (`engine/first_steps.py`). Each step then corrects their scale: other processes may
take cores away, clocks may change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mla_router.worker.core import StepPlan, StepSeconds

# Below half a second, so that a step that takes somewhat longer than expected is not above it.
TARGET_S = 0.4
# One step that takes ten times as long as expected may be an accident: a correction is at most this factor.
_LARGEST_CORRECTION = 2.0
_SMOOTHING = 0.3


class Pace:
    """Predicts the time of prompt tokens. Without a measurement all take none."""

    def __init__(self) -> None:
        self._single_s = 0.0  # of a step of one token: none is shorter
        self._token_s = 0.0
        self._context_s = 0.0
        self._prefix_s = 0.0
        self._scale = 1.0
        self._decode_s = 0.0  # of a step of decode rows alone, lately

    def calibrate(self, measured: StepSeconds) -> None:
        tokens, prefix = measured.tokens, max(1, measured.prefix)
        behind = max(0.0, measured.single_behind_prefix - measured.single)
        self._prefix_s = behind / prefix
        of_context = measured.chunk_behind_prefix - measured.chunk - behind
        self._context_s = max(0.0, of_context) / (tokens * prefix)
        linear = measured.chunk - self._context_s * tokens * tokens / 2
        # A step's time without any token is not theirs, unless noise says that all of it is.
        linear = max(linear - measured.single, linear / 4, 0.0)
        self._token_s = linear / tokens
        self._single_s = self._decode_s = measured.single

    @property
    def token_s(self) -> float:
        """Seconds of a prompt token at the speed of late, beside `context_s` for each token before it."""
        return self._scale * self._token_s

    @property
    def context_s(self) -> float:
        return self._scale * self._context_s

    def begin_s(self, start: int) -> float:
        """Seconds of a chunk behind a prefix of `start`, before its first token."""
        return self._scale * start * self._prefix_s

    def seconds(self, start: int, tokens: int) -> float:
        """Seconds of `tokens` behind a prefix of `start`, beside `begin_s`."""
        context = tokens * (start + tokens / 2)
        return tokens * self.token_s + context * self.context_s

    def tokens_within(self, seconds: float, start: int) -> float:
        """The most tokens behind a prefix of `start` that take at most so long, beside `begin_s`."""
        context_s = self.context_s
        token_s = self.token_s + start * context_s
        if seconds <= 0.0:
            return 0.0
        if context_s > 0.0:
            return (math.sqrt(token_s * token_s + 2 * context_s * seconds) - token_s) / context_s
        return seconds / token_s if token_s > 0.0 else math.inf

    def allowed(self, *, beside_decodes: bool) -> float:
        """Seconds that the prompt tokens of the next step may take. Where decode rows, or a single token,
        take most of the target already, prompts have as long as half of it, or as these."""
        rest = self._decode_s if beside_decodes else self._single_s
        return max(TARGET_S - rest, TARGET_S / 2, self._single_s)

    def step_s(self, plan: StepPlan) -> float:
        """Seconds of a step."""
        return self._rest_s(plan) + self._prompts_s(plan)

    def _rest_s(self, plan: StepPlan) -> float:
        """Seconds of a step without its prompt tokens."""
        return self._decode_s if plan.decode_slots else self._single_s

    def _prompts_s(self, plan: StepPlan) -> float:
        return sum(
            self.begin_s(chunk.start) + self.seconds(chunk.start, len(chunk.tokens))
            for chunk in plan.chunks
        )

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        if not plan.chunks:
            self._decode_s += _SMOOTHING * (seconds - self._decode_s)
            return
        rest, predicted = self._rest_s(plan), self._prompts_s(plan)
        measured = max(0.0, seconds - rest)
        if predicted == 0.0 or max(predicted, measured) < max(rest, TARGET_S / 8):
            return  # not measured, or too little to learn from
        ratio = measured / predicted
        ratio = min(max(ratio, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)
        self._scale *= math.pow(ratio, _SMOOTHING if ratio < 1 else 2 * _SMOOTHING)


@dataclass(slots=True)
class Allowance:
    """Prompt tokens that are still to be given out in a step, and the seconds for them."""

    pace: Pace
    tokens: int
    seconds: float

    def half(self) -> Allowance:
        return Allowance(self.pace, -(-self.tokens // 2), self.seconds / 2)

    def take(self, start: int, wanted: int, *, begins: bool, at_least: int = 0) -> int:
        """Tokens, of the `wanted` ones behind a prefix of `start`, that can be had; they are taken. `begins`: they
        are the first of a chunk. Where `at_least` some must be had, they are as many as take the same time as
        what comes before them: one token at a time would cost the most."""
        begin_s = self.pace.begin_s(start) if begins else 0.0
        seconds = max(self.seconds - begin_s, begin_s if at_least else 0.0)
        fitting = self.pace.tokens_within(seconds, start)
        if fitting < wanted:
            wanted = max(at_least, int(fitting))
        tokens = min(wanted, self.tokens)
        if tokens:
            self.charge(start, tokens, begins=begins)
        return tokens

    def charge(self, start: int, tokens: int, *, begins: bool) -> None:
        self.tokens -= tokens
        self.seconds -= self.pace.seconds(start, tokens)
        if begins:
            self.seconds -= self.pace.begin_s(start)
