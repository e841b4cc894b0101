"""The outgoing messages of the scheduler: one a step to each server, with all new output for it."""

from __future__ import annotations

from mla_router.worker.generation import FinishReason, Logprobs
from mla_router.worker.messages import Delta, Deltas, Generate
from mla_router.worker.scheduler.channel import Channel
from mla_router.worker.scheduler.request import Request


class Outbox:
    """Collects deltas for each server. `flush` sends them in order."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._deltas: list[list[Delta]] = [[] for _ in range(channel.num_servers)]

    def add(
        self, request: Request, tokens: list[int], logprobs: Logprobs | None = None, error: str = ""
    ) -> None:
        """Adds new output of a request, and its finish reason if it has ended."""
        reason = request.finish_reason.value if request.finish_reason else ""
        deltas = self._deltas[request.message.server]
        if request.first_delta_sent:
            deltas.append(
                Delta(request.rid, tokens, logprobs, 0, reason, error, accepted=request.accepted)
            )
            return
        request.first_delta_sent = True
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        deltas.append(
            Delta(
                request.rid,
                tokens,
                logprobs,
                request.num_cached,
                reason,
                error,
                None if prompt_logprobs is None else prompt_logprobs.found,
                request.queue_seconds,
                request.accepted,
            )
        )

    def reject(self, message: Generate, problem: str) -> None:
        """Adds the error of a request that was not accepted."""
        delta = Delta(message.rid, [], finish_reason=FinishReason.ERROR, error=problem)
        self._deltas[message.server].append(delta)

    def flush(self) -> None:
        for server, deltas in enumerate(self._deltas):
            if deltas:
                self._channel.send(Deltas(deltas), server)
                self._deltas[server] = []
