"""The token counts of a conversation's answers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from mla_router.worker.server.chat.choice import ChatChoice
from mla_router.worker.server.chat.run import ChatRun
from mla_router.worker.server.usage import CompletionTokensDetails, Usage


async def usage_of(run: ChatRun, choices: Iterable[ChatChoice]) -> Usage:
    """The counts at the end, with those of the reasoning if it is told apart."""
    usage = run.generation.usage
    if not run.splits_reasoning:
        return usage
    tokens = sum([await choice.reasoning_tokens() for choice in choices])
    return msgspec.structs.replace(usage, completion_tokens_details=CompletionTokensDetails(tokens))
