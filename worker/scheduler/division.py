"""Divides the prompt tokens of one step among the requests that want some.

One half goes by claim: requests that jump, which want few tokens, then the highest priority, then the
oldest. So a long prompt always advances at half of the speed that it would have alone. The other half goes
by size: the least work left first. So a short prompt waits for those that are shorter or about as long, and
not for a flood of long ones. What one half leaves over is the other's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from mla_router.worker.scheduler.pace import Allowance
from mla_router.worker.scheduler.request import Request


def size_class(tokens: int) -> int:
    """Requests of one class differ in size by less than a factor of 4, and are not told apart by it."""
    return tokens.bit_length() // 2


@dataclass(frozen=True, slots=True)
class Share:
    """Prompt tokens that a request may compute in a step."""

    request: Request
    tokens: int


class Division:
    """One step's; `prefilling` have begun, others come by `add`."""

    def __init__(
        self,
        prefilling: Iterable[Request],
        allowance: Allowance,
        *,
        chunk_size: int,
        by_size: bool,
    ) -> None:
        """`chunk_size`: most tokens of one request. Without `by_size` all goes by claim."""
        self._left = allowance
        self._chunk_size = chunk_size
        self._tokens: dict[Request, int] = {}
        claims = sorted(prefilling, key=lambda r: (not r.is_jumping, r.seniority))
        half = allowance.half() if by_size else allowance
        for request in claims:
            self._give(request, half, at_least=0 if self._tokens else 1)
        claims.sort(key=lambda request: size_class(self._wanted(request)))
        self._by_size = deque(claims)

    @property
    def is_spent(self) -> bool:
        return self._left.tokens < 1 or self._left.seconds <= 0.0

    def serve(self, up_to: int | None = None) -> None:
        """Give to those that have begun and are of class `up_to` at most; to all by default."""
        while self._by_size and not self.is_spent:
            if up_to is not None and size_class(self._wanted(self._by_size[0])) > up_to:
                return
            self._give(self._by_size.popleft(), self._left)

    def add(self, request: Request) -> None:
        """Give to one that begins in this step: at least a token, unless all is spent."""
        self._give(request, self._left, at_least=1)

    def shares(self) -> list[Share]:
        return [Share(request, tokens) for request, tokens in self._tokens.items()]

    def _wanted(self, request: Request) -> int:
        wanted = len(request.context) - request.launched_prompt
        return min(wanted, self._chunk_size) - self._tokens.get(request, 0)

    def _give(self, request: Request, source: Allowance, *, at_least: int = 0) -> None:
        wanted = self._wanted(request)
        if wanted < 1 or source.tokens < 1:
            return
        had = self._tokens.get(request, 0)
        start = request.launched_prompt + had
        tokens = source.take(start, wanted, begins=had == 0, at_least=at_least)
        if tokens < 1:
            return
        if source is not self._left:
            self._left.charge(start, tokens, begins=had == 0)
        self._tokens[request] = had + tokens
