"""Unknown fields: slips are refused, and the fields of other servers and clients are not."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import ToolParam, response_create_params
from openai.types.shared_params import FunctionDefinition

from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.routes import ROUTES
from mla_router.worker.server.schema.chat import ChatRequest
from mla_router.worker.server.schema.completions import CompletionRequest
from mla_router.worker.server.schema.messages import MessagesRequest
from mla_router.worker.server.schema.native import GenerateRequest, NativeSamplingFields
from mla_router.worker.server.schema.responses import ResponsesRequest
from mla_router.worker.server.schema.unknown import (
    MAX_EXAMINED,
    MAX_ITEMS,
    MAX_LENGTH,
    MAX_LIST,
    unknown_fields,
)

BODIES = {
    route.body
    for route in ROUTES
    if isinstance(route.body, type) and issubclass(route.body, msgspec.Struct)
} | {NativeSamplingFields}


@pytest.mark.parametrize(
    ("kind", "sent", "meant"),
    [
        (ChatRequest, "temprature", "temperature"),
        (ChatRequest, "temperatuer", "temperature"),
        (ChatRequest, "Temperature", "temperature"),
        (ChatRequest, "max_token", "max_tokens"),
        (ChatRequest, "max_tokenss", "max_tokens"),
        (ChatRequest, "maxTokens", "max_tokens"),
        (ChatRequest, "max-tokens", "max_tokens"),
        (ChatRequest, "max_completions_tokens", "max_completion_tokens"),
        (ChatRequest, "top-p", "top_p"),
        (ChatRequest, "topP", "top_p"),
        (ChatRequest, "stream_option", "stream_options"),
        (ChatRequest, "steam", "stream"),
        (ChatRequest, "presense_penalty", "presence_penalty"),
        (ChatRequest, "responce_format", "response_format"),
        (CompletionRequest, "promt", "prompt"),
        (ResponsesRequest, "max_output_token", "max_output_tokens"),
        (MessagesRequest, "stop_sequence", "stop_sequences"),
        (GenerateRequest, "return_logprobs", "return_logprob"),
    ],
)
def test_a_slip_is_refused_with_the_right_name(
    kind: type[msgspec.Struct], sent: str, meant: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        unknown_fields(json.dumps({sent: 1}).encode(), kind)
    error = caught.value.body.error
    assert error.message == f"unknown field `{sent}`; did you mean `{meant}`?"
    assert (error.param, error.code) == (sent, "unknown_parameter")


@pytest.mark.parametrize(
    ("kind", "body", "param", "meant"),
    [
        (
            ChatRequest,
            {"stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "stream_options.include_usage",
        ),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema", "jsonSchema": {}}},
            "response_format.jsonSchema",
            "response_format.json_schema",
        ),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}},
            "response_format.json_schema.shema",
            "response_format.json_schema.schema",
        ),
        (
            ChatRequest,
            {"tools": [{"function": {"name": "f"}}, {"function": {"name": "g", "paramters": {}}}]},
            "tools[1].function.paramters",
            "tools[1].function.parameters",
        ),
        (ChatRequest, {"tools": [{"functions": {}}]}, "tools[0].functions", "tools[0].function"),
        (
            MessagesRequest,
            {"tools": [{"name": "f", "inputSchema": {}}]},
            "tools[0].inputSchema",
            "tools[0].input_schema",
        ),
        (
            ResponsesRequest,
            {"tools": [{"name": "f", "parameter": {}}]},
            "tools[0].parameter",
            "tools[0].parameters",
        ),
        (
            GenerateRequest,
            {"text": "a", "sampling_params": {"max_new_token": 5}},
            "sampling_params.max_new_token",
            "sampling_params.max_new_tokens",
        ),
    ],
)
def test_a_slip_in_an_object_has_its_path(
    kind: type[msgspec.Struct], body: dict[str, Any], param: str, meant: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        unknown_fields(json.dumps(body).encode(), kind)
    error = caught.value.body.error
    assert error.message == f"unknown field `{param}`; did you mean `{meant}`?"
    assert error.param == param


# Fields that clients and gateways send, or that their users pass through them (2026).
FOREIGN = {
    "OpenRouter": """
        provider models route transforms plugins usage top_a reasoning include_reasoning preset trace session_id debug
        image_config user stop_server_tools_when cache_control parallel_tool_calls""",
    "LiteLLM": """
        metadata litellm_metadata litellm_trace_id litellm_call_id litellm_session_id tags text_completion caching
        mock_response mock_timeout mock_tool_calls api_key api_base api_version base_url organization prompt_id
        prompt_label prompt_variables provider_specific_header force_timeout verbose custom_llm_provider id fallbacks
        headers extra_headers extra_body extra_query model_list num_retries max_retries retry_policy roles bos_token
        eos_token timeout request_timeout stream_timeout client rpm tpm max_parallel_requests input_cost_per_token
        output_cost_per_token model_info model_config proxy_server_request preset_cache_key ttl cache no-log base_model
        cooldown_time cache_key weight ensure_alternating_roles max_fallbacks max_budget allowed_openai_params
        drop_params additional_drop_params guardrails vector_store_ids modify_params""",
    "LangChain": """
        model_name model_kwargs streaming stream_usage callbacks tags openai_api_key openai_organization rate_limiter
        default_headers output_version use_responses_api name profile stop_sequences ls_structured_output_format strict
        method include_raw truncation""",
    "text-generation-webui": """
        dynamic_temperature dynatemp_low dynatemp_high smoothing_factor repetition_penalty_range typical_p tfs top_a
        epsilon_cutoff guidance_scale negative_prompt penalty_alpha mirostat_mode temperature_last do_sample
        encoder_repetition_penalty no_repeat_ngram_size dry_multiplier xtc_threshold truncation_length
        max_tokens_second custom_token_bans sampler_priority auto_max_new_tokens ban_eos_token add_bos_token
        grammar_string mode instruction_template character context greeting user_name user_bio chat_template_str""",
    "SillyTavern": """
        chat_completion_source user_name char_name stopping_strings sampler_order rep_pen rep_pen_range min_temp max_temp
        banned_tokens banned_strings max_context_length max_length quiet trim_stop sampler_seed nsigma type names""",
    "llama.cpp": """
        n_predict n_probs n_keep cache_prompt id_slot samplers dynatemp_range typ_p repeat_penalty repeat_last_n min_keep
        mirostat tfs_z grammar lora top_n_sigma return_tokens return_progress timings_per_token reasoning_format
        input_prefix input_suffix response_fields post_sampling_probs""",
    "Ollama": "options keep_alive format raw template context think num_ctx num_predict images truncate shift",
    "hosts of open models": """
        thinking enable_thinking thinking_budget preserve_thinking clear_thinking reasoning_split reasoning_history
        safety_model context_length_exceeded_behavior prompt_truncate_len raw_output perf_metrics_in_response
        speculation random_seed safe_prompt prompt_mode enable_search search_options search_parameters deferred
        result_format incremental_output user_id tool_stream do_sample partial nvext citation_options
        compound_custom data_sources search_mode return_images max_turns""",
    "TensorRT-LLM, LMDeploy and TGI": """
        disaggregated_params detokenize end_id pad_id top_p_min top_p_decay embedding_bias random_seed renew_session
        min_new_tokens migration_request with_cache enable_thinking return_ppl inputs parameters tool_prompt details
        top_n_tokens adapter_id watermark return_full_text""",
    "pages and gateways": """
        chat_id session_id conversationId userId requestId tenant_id app_id trace_id thread_id agent_id run_id
        background_tasks features tool_ids files variables model_item tool_servers parent_id tool tools_config
        providerOptions labels project deployment""",
    "Anthropic": """
        anthropic_version betas container context_management mcp_servers inference_geo speed output_format
        max_tokens_to_sample""",
    "OpenAI": " ".join(
        {
            *chat_create_params.CompletionCreateParamsBase.__annotations__,
            *completion_create_params.CompletionCreateParamsBase.__annotations__,
            *response_create_params.ResponseCreateParamsBase.__annotations__,
        }
    ),
    # Of another endpoint
    "this server": " ".join({name for body in BODIES for name in body.__struct_fields__}),
}


@pytest.mark.parametrize(
    "kind", sorted(BODIES, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("source", FOREIGN)
def test_no_foreign_field_is_refused(source: str, kind: type[msgspec.Struct]) -> None:
    for name in FOREIGN[source].split():
        unknown_fields(json.dumps({name: None}).encode(), kind)


def test_unknown_fields_are_named_with_their_path() -> None:
    body = {
        "provider": {},
        "reasoning": {"exclude": True, "effort": "low"},
        "user": "u",
        "stop": {},
    }
    found = unknown_fields(json.dumps(body).encode(), ChatRequest)
    assert sorted(found) == ["provider", "reasoning.exclude"]
    tools = {"tools": [1, {"function": {"name": "f", "returns": {}}}]}
    assert unknown_fields(json.dumps(tools).encode(), ChatRequest) == ["tools[].function.returns"]


def test_conversations_are_not_examined() -> None:
    turn = {"role": "user", "contents": "a", "tool_call": [], "reasoningContent": ""}
    assert not unknown_fields(json.dumps({"messages": [turn]}).encode(), ChatRequest)


# Anthropic's tools, and those of other libraries
FOREIGN_TO_TOOLS = """
    cache_control allowed_callers defer_loading eager_input_streaming input_examples max_uses allowed_domains
    blocked_domains user_location citations returns responses response examples parametersJsonSchema annotations title
    meta outputSchema output_schema execution icons"""


@pytest.mark.parametrize("kind", [ChatRequest, ResponsesRequest, MessagesRequest])
def test_no_foreign_field_of_a_tool_is_refused(kind: type[msgspec.Struct]) -> None:
    known = [
        *(name for tool in get_args(ToolParam) for name in getattr(tool, "__annotations__", ())),
        *FunctionDefinition.__annotations__,
        *FOREIGN_TO_TOOLS.split(),
        "inputSchema" if kind is not MessagesRequest else "id",
    ]
    for name in known:
        for tool in ({name: None}, {"function": {name: None}}):
            unknown_fields(json.dumps({"tools": [tool]}).encode(), kind)


def test_fields_without_effect_are_no_news() -> None:
    body = b'{"store": true, "stream_options": {"include_obfuscation": false}}'
    assert not unknown_fields(body, ResponsesRequest)
    assert not unknown_fields(body, ChatRequest)


def test_an_attackers_names_cost_little() -> None:
    many = {f"name{index}": 1 for index in range(10 * MAX_EXAMINED)}
    assert len(unknown_fields(json.dumps(many).encode(), ChatRequest)) == MAX_EXAMINED
    tools = {"tools": [{"function": many}] * 3}
    assert len(unknown_fields(json.dumps(tools).encode(), ChatRequest)) == MAX_EXAMINED
    behind = [{"function": {}}] * MAX_ITEMS + [{"functions": {}}]
    assert not unknown_fields(json.dumps({"tools": behind}).encode(), ChatRequest)
    large = [{"functions": {}}, "x" * MAX_LIST]
    assert not unknown_fields(json.dumps({"tools": large}).encode(), ChatRequest)
    long = "-" * MAX_LENGTH + "top_p"
    assert unknown_fields(json.dumps({long: 1}).encode(), ChatRequest) == [long]


def test_no_slip_of_an_unsupported_field_is_suggested() -> None:
    """A suggestion must work. These fields are refused under their right name."""
    assert unknown_fields(b'{"image_config": {}, "bad_word": []}', ChatRequest) == [
        "image_config",
        "bad_word",
    ]
