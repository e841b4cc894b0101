"""Fields of SGLang, vLLM and OpenAI that are known and not supported.

They have the type `Any` and are refused by name, unless their value leaves the feature off: null, or one of `NEUTRAL`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from mla_router.worker.server.errors import InvalidField

# Values besides null that leave the feature off.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "audio_data": ([],),
    "background": (False,),
    "bad_words": ([],),
    "beam_width": (1,),
    "data_parallel_rank": (0,),
    "defer_loading": (False,),
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "input_examples": ([],),
    "length_penalty": (1.0,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prefix": (False,),
    "require_reasoning": (False,),
    "return_bytes": (False,),
    "return_cached_tokens_details": (False,),
    "return_entropy": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,),
    "return_hidden_states": (False,),
    "return_indexer_topk": (False,),
    "return_meta_info": (False,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "routed_dp_rank": (0,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "token_ids_logprob": ([],),
    "tools": ([],),
    "use_audio_in_video": (False,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """Unsupported fields of several endpoints."""

    bad_words: Any = None
    beam_width: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    data_parallel_rank: Any = None
    disagg_prefill_dp_rank: Any = None
    early_stopping: Any = None
    ec_transfer_params: Any = None
    guided_whitespace_pattern: Any = None
    images_config: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    lora_path: Any = None
    max_dynamic_patch: Any = None
    media_io_kwargs: Any = None
    min_dynamic_patch: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    ngram_corpus_id: Any = None
    repetition_detection: Any = None
    return_cached_tokens_details: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    routed_dp_rank: Any = None
    routed_experts_prompt_start: Any = None
    routed_experts_start_len: Any = None
    session_params: Any = None
    spaces_between_special_tokens: Any = None
    thinking_token_budget: Any = None
    use_audio_in_video: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None


def refuse_unsupported(request: msgspec.Struct, prefix: str = "") -> None:
    """Raises InvalidField for the first unsupported field whose value is not neutral."""
    for field in _untyped(type(request)):
        value = getattr(request, field)
        if value is not None and not _is_neutral(value, NEUTRAL.get(field, ())):
            raise InvalidField(
                prefix + field, "not supported yet; leave it out", code="unsupported_parameter"
            )


@cache
def _untyped(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(info.name for info in msgspec.structs.fields(kind) if info.type is Any)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but `"n": true` is an error.
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in neutral)
