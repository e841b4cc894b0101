"""The bodies of /generate and of what operators send, which are SGLang's."""

from __future__ import annotations

from typing import Any

import msgspec

from mla_router.worker.server.schema.continuation import Continuation
from mla_router.worker.server.schema.fields import PromptItems, SamplingFields


class NativeSampling(SamplingFields, kw_only=True):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    # refused unless neutral
    spaces_between_special_tokens: Any = None
    stop_regex: Any = None
    custom_params: Any = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """SGLang's native request."""

    text: str | list[str] | None = None
    input_ids: PromptItems | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    continuation: Continuation | None = None
    # refused unless neutral
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None

    @property
    def no_answer(self) -> bool:
        """Whether only the prompt is wanted: computed for the cache, or for its logprobs. SGLang's frontend asks so
        for what programs have in common, and for each of the choices of `select`."""
        return self.sampling_params is not None and self.sampling_params.max_new_tokens == 0


class StartProfileRequest(msgspec.Struct, kw_only=True):
    num_steps: int | None = None
    # refused: the operator says where traces go, by --profile-dir
    output_dir: Any = None


class AbortRequest(msgspec.Struct):
    rid: str
