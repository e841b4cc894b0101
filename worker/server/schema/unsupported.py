"""Fields that this version knows and cannot honour."""

from __future__ import annotations

from typing import Any

import msgspec

from mla_router.worker.server.errors import InvalidField

# Values, besides null, that leave a field's feature off.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "return_hidden_states": (False,),
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
}

# Fields that are off only when they are null or absent.
NULL_ONLY = frozenset(
    {
        "audio",
        "chat_template",
        "token_ids_logprob",
        "input_embeds",
        "image_data",
        "audio_data",
        "video_data",
        "lora_path",
        "session_params",
        "custom_logit_processor",
        "custom_params",
        "output_dir",
        "stop_regex",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "allowed_token_ids",
    }
)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but `"n": true` is a mistake and not a 1.
    return value is None or any(
        value == off and isinstance(value, bool) == isinstance(off, bool) for off in neutral
    )


def refuse_unsupported(request: msgspec.Struct, prefix: str = "") -> None:
    """Raise for the first field that asks for something this version does not do."""
    for field in request.__struct_fields__:
        neutral = () if field in NULL_ONLY else NEUTRAL.get(field)
        if neutral is not None and not _is_neutral(getattr(request, field), neutral):
            raise InvalidField(
                prefix + field, "not supported yet; leave it out", code="unsupported_parameter"
            )
