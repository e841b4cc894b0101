"""The measured time of prompt tokens on this device, which limits the prompt tokens of a step.

All requests wait for a step: running streams for their next token, new requests for their admission. So a step should
take at most `TARGET_S` seconds on any device. The model of the time of a chunk of n tokens after a prefix of p tokens is

    n * token_s  +  n * (p + n / 2) * context_s  +  p * prefix_s

The last term is the expansion of latents to keys and values, once a chunk. The constants are measured at start-up
(`engine/first_steps.py`). Each step then corrects their scale, because other processes may take cores and clock rates
may change. Chunks that take too long become shorter as long as this makes shorter steps (`elasticity.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mla_router.worker.scheduler.elasticity import Elasticity
from mla_router.worker.step.engine import StepSeconds
from mla_router.worker.step.plan import StepPlan

# A step that takes somewhat longer than predicted should still take less than half a second.
TARGET_S = 0.4
# A very slow step may be an outlier, so this factor limits each correction.
_LARGEST_CORRECTION = 2.0
_SMOOTHING = 0.3
# Below this elasticity most of a step's time is fixed, and its chunk becomes longer by `_GROWTH`.
_MIN_ELASTICITY = 0.5
_GROWTH = 1.1


class StepTimeModel:
    """Predicts the time of steps. All times are 0 before `calibrate`."""

    def __init__(self) -> None:
        self._single_s = 0.0  # of a step of one token, the shortest step
        self._token_s = 0.0
        self._context_s = 0.0
        self._prefix_s = 0.0
        self._scale = 1.0
        self._elasticity = Elasticity()
        self._decode_s = 0.0  # of a step of decode rows alone, smoothed

    def calibrate(self, measured: StepSeconds) -> None:
        tokens, prefix = measured.tokens, max(1, measured.prefix)
        of_prefix = max(0.0, measured.single_after_prefix - measured.single)
        self._prefix_s = of_prefix / prefix
        of_context = measured.chunk_after_prefix - measured.chunk - of_prefix
        self._context_s = max(0.0, of_context) / (tokens * prefix)
        linear = measured.chunk - self._context_s * tokens * tokens / 2
        # Without the fixed time of a step; noise may make the rest too small or negative.
        linear = max(linear - measured.single, linear / 4, 0.0)
        self._token_s = linear / tokens
        self._single_s = self._decode_s = measured.single

    @property
    def token_s(self) -> float:
        """Seconds of a prompt token at the current speed, without `context_s` for each token before it."""
        return self._scale * self._token_s

    @property
    def context_s(self) -> float:
        return self._scale * self._context_s

    def begin_s(self, start: int) -> float:
        """Returns the fixed seconds of a chunk after a prefix of `start` tokens."""
        return self._scale * start * self._prefix_s

    def seconds(self, start: int, tokens: int) -> float:
        """Returns the seconds of `tokens` after a prefix of `start` tokens, without `begin_s`."""
        context = tokens * (start + tokens / 2)
        return tokens * self.token_s + context * self.context_s

    def tokens_within(self, seconds: float, start: int) -> float:
        """Returns the most tokens after a prefix of `start` tokens that take at most `seconds`, without `begin_s`."""
        context_s = self.context_s
        token_s = self.token_s + start * context_s
        if seconds <= 0.0:
            return 0.0
        if context_s > 0.0:
            return (math.sqrt(token_s * token_s + 2 * context_s * seconds) - token_s) / context_s
        return seconds / token_s if token_s > 0.0 else math.inf

    def allowed(self, *, beside_decodes: bool) -> float:
        """Returns the seconds that the prompt tokens of the next step may take: the target without the time of the
        decode rows, but at least half of the target, and at least the time of a step of one token."""
        rest = self._decode_s if beside_decodes else self._single_s
        return max(TARGET_S - rest, TARGET_S / 2, self._single_s)

    def step_s(self, plan: StepPlan) -> float:
        """Returns the predicted seconds of a step."""
        return self._rest_s(plan) + self._prompts_s(plan)

    def _rest_s(self, plan: StepPlan) -> float:
        """Returns the predicted seconds of a step without its prompt tokens."""
        return self._decode_s if plan.decode_slots else self._single_s

    def _prompts_s(self, plan: StepPlan) -> float:
        return sum(
            self.begin_s(chunk.start) + self.seconds(chunk.start, len(chunk.tokens))
            for chunk in plan.chunks
        )

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Corrects the model by the measured `seconds` of a step."""
        if not plan.chunks:
            self._decode_s += _SMOOTHING * (seconds - self._decode_s)
            return
        rest, predicted = self._rest_s(plan), self._prompts_s(plan)
        measured = max(0.0, seconds - rest)
        if predicted == 0.0 or max(predicted, measured) < max(rest, TARGET_S / 8):
            return  # not calibrated, or too short for a correction
        ratio = measured / predicted
        ratio = min(max(ratio, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)
        self._elasticity.learn(predicted / self._scale, seconds)
        if ratio > 1 and self._elasticity.value < _MIN_ELASTICITY:
            self._scale /= _GROWTH
            return
        self._scale *= math.pow(ratio, _SMOOTHING if ratio < 1 else 2 * _SMOOTHING)


@dataclass(slots=True)
class TokenBudget:
    """The prompt tokens and the seconds of a step that no chunk has taken yet."""

    step_time: StepTimeModel
    tokens: int
    seconds: float

    def half(self) -> TokenBudget:
        return TokenBudget(self.step_time, -(-self.tokens // 2), self.seconds / 2)

    def take(self, start: int, wanted: int, *, begins: bool, at_least: int = 0) -> int:
        """Takes up to `wanted` tokens after a prefix of `start` tokens, and returns their number. `begins`: they are the
        first of their chunk. With `at_least`, the tokens may take as much time as the prefix costs, even beyond the
        budget: otherwise chunks of one token would spend most of their time on the prefix."""
        begin_s = self.step_time.begin_s(start) if begins else 0.0
        seconds = max(self.seconds - begin_s, begin_s if at_least else 0.0)
        fitting = self.step_time.tokens_within(seconds, start)
        if fitting < wanted:
            wanted = max(at_least, int(fitting))
        tokens = min(wanted, self.tokens)
        if tokens:
            self.charge(start, tokens, begins=begins)
        return tokens

    def charge(self, start: int, tokens: int, *, begins: bool) -> None:
        self.tokens -= tokens
        self.seconds -= self.step_time.seconds(start, tokens)
        if begins:
            self.seconds -= self.step_time.begin_s(start)
