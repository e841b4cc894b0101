"""Converts the prompts of a request (text or token ids, one or several) to lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from mla_router.worker.messages import Ready
from mla_router.worker.server.errors import InvalidField, MissingField
from mla_router.worker.server.schema.continuation import MAX_PROMPTS
from mla_router.worker.server.schema.fields import PromptItem
from mla_router.worker.server.state import Service

MAX_KEY_LENGTH = 256  # characters of `cache_salt` and of `extra_key`


async def read_prompts(
    service: Service,
    prompt: str | Sequence[PromptItem] | None,
    field: str,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Returns one list of token ids for each prompt. Raises InvalidField.

    `prompt` is a string, a list of strings, a list of ids, or a list of lists of ids.
    """
    if prompt is None:
        raise MissingField(field)
    items: Sequence[PromptItem] = [prompt] if isinstance(prompt, str) else prompt
    if items and all(isinstance(item, int) for item in items):
        items = [cast("list[int]", items)]
    # Before the first prompt is tokenized: this bounds the cost of a request.
    if not 1 <= len(items) <= MAX_PROMPTS:
        raise InvalidField(field, f"give 1 to {MAX_PROMPTS} prompts")
    context_length = service.limits.context_length
    if all(isinstance(item, str) for item in items):
        texts = cast("list[str]", items)
        prompts = [
            await service.tokenizer.encode(
                text,
                context_length=context_length,
                add_special_tokens=add_special_tokens,
                field=field,
            )
            for text in texts
        ]
    elif all(isinstance(item, list) for item in items):
        prompts = cast("list[list[int]]", items)
    else:
        raise InvalidField(field, "do not mix texts, token ids and lists of token ids")
    for ids in prompts:
        check_ids(ids, service.limits.vocab_size, field)
    return prompts


def check_ids(ids: list[int], vocab_size: int, field: str) -> None:
    """Raises InvalidField for ids outside the vocabulary. They would fail the step of the whole batch."""
    if not ids:
        raise InvalidField(field, "a prompt must have at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise InvalidField(field, f"token ids must be between 0 and {vocab_size - 1}")


@dataclass(frozen=True, slots=True)
class Truncation:
    """vLLM's truncate_prompt_tokens and truncation_side. Raises InvalidField."""

    limit: int | None  # number of tokens that stay; -1: all that leave room for the answer
    side: Literal["left", "right"] | None = None  # the end that is cut off; default left

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit != -1 and self.limit < 1:
            raise InvalidField("truncate_prompt_tokens", "must be at least 1, or -1")

    def cut(self, prompt: list[int], limits: Ready, max_tokens: int | None) -> list[int]:
        limit = self.limit
        if limit == -1:
            room = min(limits.context_length, limits.max_total_num_tokens)
            limit = max(1, room - (max_tokens or 1))
        if limit is None or len(prompt) <= limit:
            return prompt
        return prompt[:limit] if self.side == "right" else prompt[-limit:]


def cache_key(cache_salt: str | None, extra_key: str | None) -> str:
    """Returns the key of the prefix cache: requests share cached prefixes only within one key.

    `cache_salt` is vLLM's field, `extra_key` is SGLang's. Raises InvalidField.
    """
    salt, extra = cache_salt or "", extra_key or ""
    for field, value in (("cache_salt", salt), ("extra_key", extra)):
        if len(value) > MAX_KEY_LENGTH:
            raise InvalidField(field, f"at most {MAX_KEY_LENGTH} characters")
    # The length marks the end of the salt: "ab" and "c" differ from "a" and "bc".
    return f"{len(salt)}:{salt}{extra}" if extra else salt
