"""The prefill budget: divides the prompt tokens of one step among the requests in prefill.

One half goes by claim: first requests after a jump (few tokens), then by priority, then by age. So a long prompt always
advances, at half the speed that it would have alone. The other half goes by size, the least remaining work first. So a
short prompt waits for prompts of its size or shorter, but not for many long ones. Each half may use the rest of the
other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from mla_router.worker.scheduler.request import Request
from mla_router.worker.scheduler.step_time import TokenBudget


def size_class(tokens: int) -> int:
    """Returns the size class of a request. Sizes of one class differ by less than a factor of 4."""
    return tokens.bit_length() // 2


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """The number of prompt tokens that a request computes in one step."""

    request: Request
    tokens: int


class PrefillBudget:
    """The budget of one step, for the requests in prefill and those that `add` brings."""

    def __init__(
        self,
        prefilling: Iterable[Request],
        step_budget: TokenBudget,
        *,
        chunk_size: int,
        by_size: bool,
    ) -> None:
        """`prefilling`: requests in prefill. `chunk_size`: maximum number of tokens of one request. Without `by_size`
        the whole budget goes by claim."""
        self._left = step_budget
        self._chunk_size = chunk_size
        self._tokens: dict[Request, int] = {}
        claims = sorted(prefilling, key=lambda r: (not r.is_jumping, r.seniority))
        half = step_budget.half() if by_size else step_budget
        for request in claims:
            self._give(request, half, at_least=0 if self._tokens else 1)
        claims.sort(key=lambda request: size_class(self._wanted(request)))
        self._by_size = deque(claims)

    @property
    def is_spent(self) -> bool:
        return self._left.tokens < 1 or self._left.seconds <= 0.0

    def distribute(self, up_to: int | None = None) -> None:
        """Gives tokens to the requests in prefill, shortest first, up to size class `up_to`; by default to all."""
        while self._by_size and not self.is_spent:
            if up_to is not None and size_class(self._wanted(self._by_size[0])) > up_to:
                return
            self._give(self._by_size.popleft(), self._left)

    def add(self, request: Request) -> None:
        """Gives tokens to a request that starts in this step: at least one, unless the budget is spent."""
        self._give(request, self._left, at_least=1)

    def chunks(self) -> list[ChunkBudget]:
        return [ChunkBudget(request, tokens) for request, tokens in self._tokens.items()]

    def _wanted(self, request: Request) -> int:
        wanted = len(request.context) - request.launched_prompt
        return min(wanted, self._chunk_size) - self._tokens.get(request, 0)

    def _give(self, request: Request, source: TokenBudget, *, at_least: int = 0) -> None:
        had = self._tokens.get(request, 0)
        start = request.launched_prompt + had
        tokens = source.take(start, self._wanted(request), begins=had == 0, at_least=at_least)
        if tokens < 1:
            return
        if source is not self._left:
            self._left.charge(start, tokens, begins=had == 0)
        self._tokens[request] = had + tokens
