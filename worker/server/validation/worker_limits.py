"""Checks a request against the limits and settings of its worker."""

from __future__ import annotations

from mla_router.worker.generation import SamplingParams
from mla_router.worker.messages import Ready
from mla_router.worker.server.errors import InvalidField, InvalidRequest
from mla_router.worker.server.validation.sampling import CheckedSampling

MAX_PRIORITY = 100
# Of the prompts of a request: their text is made at once, while other requests wait.
MAX_PROMPT_LOGPROBS = 1 << 22


def fit(
    sampling: CheckedSampling,
    prompt_tokens: int,
    limits: Ready,
    default: int | None,
    prompt_field: str | None = None,
) -> int:
    """Returns max_tokens for a prompt of `prompt_tokens`. If the client gives no number, it is `default`, or less if the
    context is shorter; with `default` None it is the remaining context. Raises InvalidRequest if the tokens do not fit."""
    room = min(limits.context_length, limits.max_total_num_tokens) - prompt_tokens
    # Clients recognise a too long conversation by these words ("maximum context length is", "is longer than the
    # model's context length"), and read the two numbers.
    bound, reason = min(
        (limits.context_length, ""),
        (limits.max_total_num_tokens, ", the size of the KV cache"),
    )
    if sampling.max_tokens is not None:
        if sampling.max_tokens > room:
            raise InvalidRequest(
                f"This model's maximum context length is {bound} tokens{reason}. However, {prompt_tokens} prompt "
                f"tokens and {sampling.max_tokens_field} {sampling.max_tokens} make "
                f"{prompt_tokens + sampling.max_tokens} tokens; shorten the prompt or the output",
                param=sampling.max_tokens_field if room > 0 else prompt_field,
                code="context_length_exceeded",
            )
        return sampling.max_tokens
    if room < 1:
        raise InvalidRequest(
            f"The input ({prompt_tokens} tokens) is longer than the model's context length ({bound} tokens{reason}), "
            "which includes at least one output token; shorten the prompt",
            param=prompt_field,
            code="context_length_exceeded",
        )
    return room if default is None else min(default, room)


def check_prompt_logprobs(params: SamplingParams, lengths: list[int], field: str) -> None:
    """Raises InvalidField for more log-probabilities than an answer may hold. `lengths`: the tokens of the prompt of each
    choice."""
    if (start := params.prompt_logprobs_from) is None:
        return
    values = sum(max(length - start, 0) for length in lengths) * (1 + params.top_logprobs)
    if values > MAX_PROMPT_LOGPROBS:
        raise InvalidField(
            field,
            f"{values} log-probabilities of prompts are more than {MAX_PROMPT_LOGPROBS}: send fewer prompts in a "
            "request, or ask for fewer tokens at each position",
        )


def check_priority(priority: int | None, *, enabled: bool) -> None:
    """Raises InvalidField for a priority out of range, or if the scheduler ignores priorities."""
    if priority is None or priority == 0:
        return
    if not enabled:
        raise InvalidField("priority", "this worker runs without --enable-priority-scheduling")
    if abs(priority) > MAX_PRIORITY:
        raise InvalidField("priority", f"must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
