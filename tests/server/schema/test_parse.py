"""Parsing of bodies: errors name the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.schema.chat import ChatRequest
from mla_router.worker.server.schema.completions import CompletionRequest
from mla_router.worker.server.schema.messages import MessagesRequest
from mla_router.worker.server.schema.native import GenerateRequest, NativeSamplingFields
from mla_router.worker.server.schema.parse import parse
from mla_router.worker.server.schema.unknown import NO_EFFECT
from mla_router.worker.server.schema.unsupported import NEUTRAL, refuse_unsupported

CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"temperature": "hot"}', "temperature"),
        (b'{"temperature": true}', "temperature"),
        (b'{"temperature": 1e400}', "temperature"),
        (b'{"max_tokens": 1.5}', "max_tokens"),
        (b'{"max_tokens": "5"}', "max_tokens"),
        (b'{"messages": "hello"}', "messages"),
        (b'{"messages": [{"content": "x"}]}', "messages[0].role"),
        (b'{"messages": [{"role": 5}]}', "messages[0].role"),
        (
            b'{"messages": [{"role": "user", "content": [{"text": "x"}]}]}',
            "messages[0].content[0].type",
        ),
        (b'{"stop": [1]}', "stop[0]"),
        (b'{"stream": 1}', "stream"),
        (b'{"n": true}', "n"),
        (b'{"top_logprobs": "5"}', "top_logprobs"),
        (b'{"stream_options": []}', "stream_options"),
        (b'{"stop_token_ids": [1.0]}', "stop_token_ids[0]"),
    ],
)
def test_a_wrong_type_names_its_field(body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, CHAT)
    assert caught.value.body.error.param == param
    assert param in caught.value.body.error.message


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(b'{"max_tokens": 1}', msgspec.json.Decoder(MessagesRequest))
    error = caught.value.body.error
    assert (error.param, error.code) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"tool_choice": "maybe"}', "tool_choice: .* 'maybe'; one of auto, none, required"),
        (b'{"tools": [{"type": "web_search"}]}', r"tools\[0\].type: .*; one of function"),
        (
            b'{"response_format": {"type": "xml"}}',
            "one of text, json_object, json_schema, structural_tag$",
        ),
        (b'{"logit_bias": {"1": "x"}}', r"Expected `float`, got `str`$"),
        (b'{"seed": "x"}', r"got `str`$"),
    ],
)
def test_a_wrong_text_is_answered_with_the_right_ones(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(body, CHAT)


def test_other_encodings_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^The body is not valid UTF-8$"):
        parse('{"messages": [{"role": "é"}]}'.encode("latin-1"), CHAT)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"a": 1} {}',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\ud800abc"}',
        b'{"model": "a\nb"}',
        b'{"tools": ' + b"[" * 100_000,
        b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"unknown": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(body, CHAT)


def test_unknown_fields_are_ignored() -> None:
    body = b'{"model": "m", "user": "u", "metadata": {"a": [1]}, "provider": {}, "model": "n"}'
    request, ignored = parse(body, CHAT)
    assert request.model == "n"
    assert ignored == ["provider"]


def test_prompts_of_all_four_kinds() -> None:
    for prompt in ("text", ["a", "b"], [1, 2], [[1], [2, 3]]):
        request, _ = parse(msgspec.json.encode({"prompt": prompt}), COMPLETION)
        assert request.prompt == prompt


UNSUPPORTED: list[tuple[type[msgspec.Struct], str, Any]] = [
    (ChatRequest, "chat_template", "{{ 1 }}"),
    (ChatRequest, "guided_whitespace_pattern", "[ ]?"),
    (CompletionRequest, "bad_words", ["no"]),
    (CompletionRequest, "suffix", "end"),
    (GenerateRequest, "token_ids_logprob", [1]),
    (GenerateRequest, "audio_data", "x"),
    (GenerateRequest, "custom_logit_processor", "x"),
    (NativeSamplingFields, "custom_params", {"a": 1}),
]


@pytest.mark.parametrize(("kind", "name", "value"), UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(
    kind: type[msgspec.Struct], name: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        refuse_unsupported(kind(**{name: value}))
    assert caught.value.body.error.param == name
    assert caught.value.body.error.code == "unsupported_parameter"


def test_neutral_values_pass() -> None:
    for kind in (ChatRequest, CompletionRequest, GenerateRequest, NativeSamplingFields):
        for name in kind.__struct_fields__:
            for value in NEUTRAL.get(name, ()):
                refuse_unsupported(kind(**{name: value}))
            refuse_unsupported(kind(**{name: None}))


# Fields for models of images, audio and video only.
OF_MEDIA = frozenset(
    [
        "encoder_urls",
        "image_max_dynamic_patch",
        "mm_content_hashes",
        "mm_hashes",
        "need_wait_for_mm_inputs",
        "num_items_assigned",
        "video_config",
        "video_max_dynamic_patch",
    ]
)
SGLANG_SHARED = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options temperature
    top_p user return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
    return_token_ids top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos
    skip_special_tokens lora_path session_id session_params response_format custom_params custom_logit_processor
    images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank
    rid extra_key cache_salt ngram_corpus_id priority
"""
VLLM_SHARED = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval
"""
PEERS: list[tuple[str, type[msgspec.Struct], str]] = [
    (
        "SGLang's ChatCompletionRequest",
        ChatRequest,
        SGLANG_SHARED
        + """messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls return_prompt_token_ids
        return_meta_info reasoning_effort reasoning task continue_final_message separate_reasoning stream_reasoning
        chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids""",
    ),
    (
        "SGLang's CompletionRequest",
        CompletionRequest,
        SGLANG_SHARED + "prompt best_of echo suffix json_schema custom_labels",
    ),
    (
        "vLLM's ChatCompletionRequest",
        ChatRequest,
        VLLM_SHARED
        + """messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
        parallel_tool_calls echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
        media_io_kwargs mm_processor_kwargs return_prompt_text""",
    ),
    (
        "vLLM's CompletionRequest",
        CompletionRequest,
        VLLM_SHARED + "prompt echo suffix prompt_embeds",
    ),
    (
        "Anthropic's MessageCreateParams",
        MessagesRequest,
        """max_tokens messages model cache_control container diagnostics inference_geo metadata output_config
        service_tier speed stop_sequences system temperature thinking tool_choice tools top_k top_p user_profile_id
        workspace_id stream mcp_servers context_management output_format""",
    ),
    (
        "SGLang's GenerateReqInput",
        GenerateRequest,
        """rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes mm_content_hashes
        use_audio_in_video video_config sampling_params return_logprob logprob_start_len top_logprobs_num
        token_ids_logprob return_sampling_mask return_text_in_logprobs return_flat_raw_top_logprobs
        return_flat_raw_top_logprobs_b64 stream log_metrics return_hidden_states return_routed_experts
        routed_experts_start_len return_indexer_topk modalities session_params lora_path lora_id custom_logit_processor
        positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size
        routed_dp_rank data_parallel_rank disagg_prefill_dp_rank kv_router_hint routing_key conversation_id
        http_worker_ipc background require_reasoning max_thinking_tokens priority extra_key no_logs custom_labels
        return_bytes return_entropy return_prompt_token_ids external_trace_header received_time need_wait_for_mm_inputs
        num_items_assigned encoder_urls max_dynamic_patch min_dynamic_patch image_max_dynamic_patch
        video_max_dynamic_patch images_config multi_item_delimiter_indices cache_salt""",
    ),
    (
        "SGLang's SamplingParams",
        NativeSamplingFields,
        """max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
        repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens
        spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias sampling_seed beam_width""",
    ),
]


@pytest.mark.parametrize(("peer", "kind", "fields"), PEERS, ids=lambda value: str(value)[:32])
def test_no_field_of_a_peer_is_dropped_silently(
    peer: str, kind: type[msgspec.Struct], fields: str
) -> None:
    """The names come from the request models of the two projects (2026)."""
    dropped = set(fields.split()) - set(kind.__struct_fields__) - NO_EFFECT - OF_MEDIA
    assert not dropped, f"{peer}: {sorted(dropped)}"
