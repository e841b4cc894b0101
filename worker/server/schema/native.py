"""The bodies of SGLang's native endpoints: /generate and the admin endpoints."""

from __future__ import annotations

from typing import Any

import msgspec

from mla_router.worker.server.schema.continuation import Continuation
from mla_router.worker.server.schema.fields import SamplingFields
from mla_router.worker.server.schema.unsupported import UnsupportedFields

# data: URLs, URLs or base64: of one prompt, or a list for each of several
NativeMedia = str | list[str | list[str] | None]


class NativeSamplingFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None


class GenerateRequest(UnsupportedFields, kw_only=True):
    """The body of /generate."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSamplingFields | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    continuation: Continuation | None = None
    image_data: NativeMedia | None = None
    video_data: NativeMedia | None = None
    # refused unless neutral
    audio_data: Any = None
    background: Any = None
    bootstrap_pair_key: Any = None
    decode_tp_size: Any = None
    input_embeds: Any = None
    kv_router_hint: Any = None
    lora_id: Any = None
    max_thinking_tokens: Any = None
    multi_item_delimiter_indices: Any = None
    positional_embed_overrides: Any = None
    require_reasoning: Any = None
    return_bytes: Any = None
    return_entropy: Any = None
    return_flat_raw_top_logprobs: Any = None
    return_flat_raw_top_logprobs_b64: Any = None
    return_indexer_topk: Any = None
    return_prompt_token_ids: Any = None
    return_sampling_mask: Any = None
    token_ids_logprob: Any = None

    @property
    def no_answer(self) -> bool:
        """Whether the request only computes the prompt, for the cache or for its logprobs. SGLang's frontend does this
        for common prefixes of programs, and for each choice of `select`."""
        return self.sampling_params is not None and self.sampling_params.max_new_tokens == 0


class StartProfileRequest(msgspec.Struct, kw_only=True):
    num_steps: int | None = None
    # refused: the operator chooses the folder by --profile-dir
    output_dir: Any = None


class AbortRequest(msgspec.Struct):
    """The body of /abort_request: one request, or all."""

    rid: str | None = None
    abort_all: bool | None = None
