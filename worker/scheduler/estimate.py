"""The expected length of answers, for which admission reserves memory.

Few answers use all of their max_tokens. A reservation for all of them would leave most of the memory empty; no
reservation would exhaust it all the time. As with SGLang's new_token_ratio, a fraction of the tokens that each request
may still generate is reserved. The fraction falls with every step, and rises to the observed fraction when memory runs
out.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from mla_router.worker.scheduler.request import Request, State

# SGLang's numbers: the ratio at the start, the least one, and the steps from one to the other
_START = 0.7
_MIN_SHARE = 0.14  # of the start
_STEPS_TO_MIN = 600
# Maximum number of remaining tokens that are counted. Beyond this number a request is as likely to end as to go on.
_HORIZON = 4096
# Steps for which the other requests can run after a retraction, if none of them ends.
_HEADROOM = 20


class OutputEstimate:
    """Expects that running requests generate the fraction `ratio` of their remaining max_tokens."""

    def __init__(self, conservativeness: float) -> None:
        self._start = min(1.0, _START * conservativeness)
        self._least = self._start * _MIN_SHARE
        self.ratio = self._start

    def length(self, request: Request) -> int:
        """Returns the expected number of tokens in the request's KV cache at its end, at least those after its next
        decode step."""
        if request.state is State.DECODE:
            generated = request.launched_outputs
            known = len(request.prompt) + generated - 1
        else:
            generated = len(request.output)
            known = len(request.context)
        left = min(request.sampling.max_tokens - generated, _HORIZON)
        least = request.draft_bound(request.tokens_per_row)
        expected = max(math.ceil(left * self.ratio), least)
        return min(known + expected, request.max_length)

    def step(self) -> None:
        """Lowers the ratio after a step without a retraction."""
        self.ratio = max(self._least, self.ratio - (self._start - self._least) / _STEPS_TO_MIN)

    def idle(self) -> None:
        """Resets the ratio, because the next requests may be different."""
        self.ratio = self._start

    def learn(self, running: Collection[Request]) -> None:
        """Raises the ratio after a retraction, so that the requests `running` can go on for some steps."""
        generated = sum(len(request.output) + _HEADROOM for request in running)
        allowed = sum(request.sampling.max_tokens for request in running)
        self.ratio = min(1.0, max(self.ratio, generated / max(1, allowed)))
