"""Whether shorter chunks make shorter steps.

On a busy machine a step may have a large fixed time: each of its parallel operations waits for a core. If all of it
counted as time of the prompt tokens, chunks would become shorter and shorter, down to a few tokens, and the steps
would still take as long.
"""

from __future__ import annotations

import math

_DECAY = 0.7  # of what was seen, at each change of the chunk
_FADE = 0.9  # the same at each step without a change, so that shorter chunks are tried again
_PRIOR = 0.05  # weight of the assumption that a step is in proportion to its chunk
_LEAST_CHANGE = 0.1  # of the logarithm; smaller ones say nothing
_MOST = 1.5  # elasticity of one change; the rest is noise


class Elasticity:
    """The relative change of a step's time for a relative change of its prompt tokens' predicted time: 1 if they are in
    proportion, 0 if all of the time is fixed."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None
        # Least squares over changes (dx, dy) of the logarithms: sums of dx * dy and of dx * dx
        self._xy = self._xx = 0.0

    @property
    def value(self) -> float:
        return (self._xy + _PRIOR) / (self._xx + _PRIOR)

    def learn(self, prompts_s: float, step_s: float) -> None:
        """Takes a step of `step_s` seconds, whose prompt tokens were predicted to take `prompts_s`, both > 0."""
        x, y = math.log(prompts_s), math.log(step_s)
        before, self._before = self._before, (x, y)
        if before is None:
            return
        dx, dy = x - before[0], y - before[1]
        if abs(dx) < _LEAST_CHANGE:
            self._xy, self._xx = _FADE * self._xy, _FADE * self._xx
            return
        dy = min(max(dy, -_MOST * abs(dx)), _MOST * abs(dx))
        self._xy, self._xx = _DECAY * self._xy + dx * dy, _DECAY * self._xx + dx * dx
