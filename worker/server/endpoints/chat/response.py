"""The complete response of /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mla_router.worker.server.endpoints.chat.choice import ChatChoice, usage_of
from mla_router.worker.server.endpoints.chat.prepare import PreparedChat
from mla_router.worker.server.endpoints.chat.schema import (
    Choice,
    Completion,
    Function,
    Message,
    ToolCall,
)
from mla_router.worker.server.endpoints.logprobs import prompt_logprobs
from mla_router.worker.server.requests.choice import Finish
from mla_router.worker.server.text.tool_calls.parts import Arguments, Call, Content, Part, Reasoning


@dataclass(slots=True)
class Collector:
    """Collects the parts of a choice."""

    choice: ChatChoice
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)  # id, name, arguments
    finish: Finish | None = None

    def add(self, part: Part) -> None:
        if isinstance(part, Reasoning):
            self.reasoning.append(part.text)
        elif isinstance(part, Content):
            self.content.append(part.text)
        elif isinstance(part, Call):
            self.calls.append((self.choice.next_call_id(), part.name, []))
        elif isinstance(part, Arguments):
            self.calls[-1][2].append(part.text)

    def message(self) -> Message:
        content = "".join(self.content)
        calls = [
            ToolCall(call_id, "function", Function(name, "".join(arguments)))
            for call_id, name, arguments in self.calls
        ]
        reasoning = "".join(self.reasoning) or None
        return Message(
            content=content or (None if calls else ""),
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or msgspec.UNSET,
        )


async def collect(prepared: PreparedChat) -> list[Collector]:
    """Runs the request to its end. Returns a collector for each choice."""
    handler = prepared.handler
    collected = [Collector(ChatChoice(prepared, index)) for index in range(handler.size)]
    while outputs := await handler.next():
        for output in outputs:
            collector = collected[output.index]
            for part in collector.choice.take(output):
                collector.add(part)
            collector.finish = output.finish
    return collected


async def completion(prepared: PreparedChat, model: str) -> Completion:
    handler, details = prepared.handler, prepared.details
    collected = await collect(prepared)
    answer = Completion(
        **handler.identity.envelope("chatcmpl-", model),
        choices=[_choice(index, collector) for index, collector in enumerate(collected)],
        usage=await usage_of(prepared, [collector.choice for collector in collected]),
        metrics=handler.timing,
    )
    prompt = handler.prompts[0]
    if details.token_ids:
        answer.prompt_token_ids = prompt
    logprobs = collected[0].choice.prompt_logprobs  # None after an early abort
    if details.prompt_logprobs is not None and logprobs is not None:
        answer.prompt_logprobs = await prompt_logprobs(
            handler.service.tokenizer, prompt, logprobs, details.prompt_logprobs
        )
    return answer


def _choice(index: int, collector: Collector) -> Choice:
    choice, finish = collector.choice, collector.finish
    assert finish is not None, f"choice {index} has not ended"
    return Choice(
        index,
        collector.message(),
        choice.take_logprobs(),
        choice.reason_of(finish) or "",
        finish.matched,
        finish.stop_reason,
        choice.take_token_ids() if choice.prepared.details.token_ids else None,
    )
