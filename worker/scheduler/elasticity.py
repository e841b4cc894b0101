"""Estimates whether shorter chunks make shorter steps.

On a busy machine a step may have a large fixed time, because each of its parallel operations waits for a core. If the
fixed time counted as time of the prompt tokens, chunks would shrink to a few tokens, and the steps would still take as
long.
"""

from __future__ import annotations

import math

_DECAY = 0.7  # of earlier observations, at each change of the chunk
_FADE = 0.9  # of earlier observations, at each step without a change, so that shorter chunks are tried again
_PRIOR = 0.05  # weight of the prior: the time of a step is proportional to its chunk
_MIN_CHANGE = 0.1  # of the logarithm; smaller changes are ignored
_MAX_ELASTICITY = 1.5  # largest elasticity of one change; a larger one is noise


class Elasticity:
    """The relative change of a step's time for a relative change of the predicted time of its prompt tokens: 1 if they are
    proportional, 0 if the whole time is fixed."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None
        # Least squares over changes (dx, dy) of the logarithms: sums of dx * dy and of dx * dx
        self._xy = self._xx = 0.0

    @property
    def value(self) -> float:
        return (self._xy + _PRIOR) / (self._xx + _PRIOR)

    def learn(self, prompts_s: float, step_s: float) -> None:
        """Adds a step of `step_s` seconds, whose prompt tokens had a predicted time of `prompts_s` seconds, both > 0."""
        x, y = math.log(prompts_s), math.log(step_s)
        before, self._before = self._before, (x, y)
        if before is None:
            return
        dx, dy = x - before[0], y - before[1]
        if abs(dx) < _MIN_CHANGE:
            self._xy, self._xx = _FADE * self._xy, _FADE * self._xx
            return
        dy = min(max(dy, -_MAX_ELASTICITY * abs(dx)), _MAX_ELASTICITY * abs(dx))
        self._xy, self._xx = _DECAY * self._xy + dx * dy, _DECAY * self._xx + dx * dx
