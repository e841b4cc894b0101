"""How long answers will become: what admission keeps free for the requests that run.

Few answers use all of their max_tokens. Keeping room for all of it would leave most of the memory
empty, keeping none would run out of it all the time. As in SGLang (its new_token_ratio), a share of
what each request may still generate is kept; the share falls while things go well and rises to what
was seen when they do not.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from mla_router.worker.scheduler.request import Request, State

_START = 0.7
_LEAST = 0.14  # of the start
_STEPS_TO_LEAST = 600
# Beyond so many tokens to come, a request is as likely to end as to go on.
_HORIZON = 4096
# After a retraction those that go on can run for so many steps, if none of them ends.
_HEADROOM = 20


class OutputEstimate:
    """`ratio` of the tokens that running requests may still generate is expected to come."""

    def __init__(self, conservativeness: float) -> None:
        self._start = min(1.0, _START * conservativeness)
        self._least = self._start * _LEAST
        self.ratio = self._start

    def length(self, request: Request) -> int:
        """Tokens that the request's KV cache will hold at its end, probably."""
        if request.state is State.DECODE:
            generated = request.launched_outputs
            known = len(request.prompt) + generated - 1
        else:
            generated = len(request.output)
            known = len(request.context)
        left = min(request.sampling.max_tokens - generated, _HORIZON)
        return min(known + math.ceil(left * self.ratio), request.max_length)

    def step(self) -> None:
        """A step went well."""
        self.ratio = max(self._least, self.ratio - (self._start - self._least) / _STEPS_TO_LEAST)

    def idle(self) -> None:
        """What comes next may be of another kind."""
        self.ratio = self._start

    def learn(self, running: Collection[Request]) -> None:
        """It was too low. Without another retraction `running` can go on for some steps."""
        generated = sum(len(request.output) + _HEADROOM for request in running)
        allowed = sum(request.sampling.max_tokens for request in running)
        self.ratio = min(1.0, max(self.ratio, generated / max(1, allowed)))
