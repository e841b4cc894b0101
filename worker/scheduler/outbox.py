"""What the server is told: one message a step, with everything that the step produced."""

from __future__ import annotations

from mla_router.worker.core import Scores
from mla_router.worker.messages import Delta, Deltas
from mla_router.worker.scheduler.channel import Channel
from mla_router.worker.scheduler.request import Request


class Outbox:
    """Deltas on their way to the server. `flush` sends those since the last one, in order."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._deltas: list[Delta] = []

    def tell(
        self, request: Request, tokens: list[int], scores: Scores | None = None, error: str = ""
    ) -> None:
        """New output of a request, and its end if it has come."""
        reason = request.finish_reason.value if request.finish_reason else ""
        if request.is_known:
            self._deltas.append(Delta(request.rid, tokens, scores, 0, reason, error))
            return
        request.is_known = True
        self._deltas.append(
            Delta(
                request.rid,
                tokens,
                scores,
                request.num_cached,
                reason,
                error,
                request.prompt_scores,
                request.queue_seconds,
            )
        )
        request.prompt_scores = None

    def reject(self, rid: str, problem: str) -> None:
        """Say that a request was not accepted."""
        self._deltas.append(Delta(rid, [], finish_reason="error", error=problem))

    def flush(self) -> None:
        if self._deltas:
            self._channel.send(Deltas(self._deltas))
            self._deltas = []
