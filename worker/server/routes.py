"""The table of all routes. The application and its OpenAPI document are made from it."""

from __future__ import annotations

from typing import Any

from mla_router.worker.server.endpoints import (
    admin,
    completions,
    generate,
    info,
    native_answer,
    openapi,
    tokenize,
)
from mla_router.worker.server.endpoints.chat import handler, schema
from mla_router.worker.server.endpoints.messages import handler as messages
from mla_router.worker.server.endpoints.messages.schema import Message, TokenCount
from mla_router.worker.server.endpoints.responses.handler import responses
from mla_router.worker.server.endpoints.responses.schema import Response
from mla_router.worker.server.http.route import Route
from mla_router.worker.server.schema.chat import ChatRequest
from mla_router.worker.server.schema.completions import CompletionRequest
from mla_router.worker.server.schema.messages import MessagesRequest
from mla_router.worker.server.schema.native import (
    AbortRequest,
    GenerateRequest,
    StartProfileRequest,
)
from mla_router.worker.server.schema.responses import ResponsesRequest
from mla_router.worker.server.schema.tokenize import DetokenizeRequest, TokenizeRequest

ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        handler.chat_completions,
        "Answers a conversation.",
        ChatRequest,
        schema.Completion,
        schema.Chunk,
    ),
    Route(
        "POST",
        "/v1/completions",
        completions.completions,
        "Continues prompts.",
        CompletionRequest,
        completions.Completion,
        completions.Completion,
    ),
    Route(
        "POST",
        "/v1/responses",
        responses,
        "Answers a conversation, in the form of OpenAI's Responses.",
        ResponsesRequest,
        Response,
        dict[str, Any],
    ),
    Route(
        "POST",
        "/v1/messages",
        messages.messages,
        "Answers a conversation, in the form of Anthropic's Messages.",
        MessagesRequest,
        Message,
        dict[str, Any],
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_tokens,
        "Counts the prompt tokens of the same body in /v1/messages.",
        MessagesRequest,
        TokenCount,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        info.embeddings,
        "Refused: the served models only generate text.",
        dict[str, Any],
    ),
    Route(
        "POST",
        "/generate",
        generate.generate,
        "Continues prompts, in SGLang's native API.",
        GenerateRequest,
        native_answer.Answer | list[native_answer.Answer],
        native_answer.Answer,
    ),
    Route(
        "POST",
        "/tokenize",
        tokenize.tokenize,
        "Converts text to token ids.",
        TokenizeRequest,
        tokenize.TokenizeResponse,
    ),
    Route(
        "POST",
        "/detokenize",
        tokenize.detokenize,
        "Converts token ids to text.",
        DetokenizeRequest,
        tokenize.DetokenizeResponse,
    ),
    Route(
        "POST",
        "/v1/tokenize",
        tokenize.tokenize,
        "The same as /tokenize.",
        TokenizeRequest,
        tokenize.TokenizeResponse,
    ),
    Route(
        "POST",
        "/v1/detokenize",
        tokenize.detokenize,
        "The same as /detokenize.",
        DetokenizeRequest,
        tokenize.DetokenizeResponse,
    ),
    Route(
        "GET",
        "/tokenizer_info",
        tokenize.tokenizer_info,
        "The tokenizer's special tokens and its chat template.",
        answer=tokenize.TokenizerInfo,
    ),
    Route("GET", "/v1/models", info.models, "The served model, as a list."),
    Route("GET", "/v1/models/{model:.+}", info.model, "The served model."),
    Route("GET", "/health", info.health, "200 if the worker can serve, else 503.", needs_key=False),
    Route("GET", "/health_generate", info.health, "The same as /health.", needs_key=False),
    Route("GET", "/get_model_info", info.model_info, "The served model and its folders."),
    Route("GET", "/get_server_info", info.server_info, "Settings, limits and load."),
    Route("GET", "/model_info", info.model_info, "The same as /get_model_info."),
    Route("GET", "/server_info", info.server_info, "The same as /get_server_info."),
    Route(
        "GET", "/get_load", info.load, "Running and waiting requests.", answer=list[dict[str, Any]]
    ),
    Route("GET", "/metrics", info.metrics, "Metrics in Prometheus' text format.", answer=str),
    Route(
        "POST",
        "/flush_cache",
        admin.flush_cache,
        "Evicts all cached prefixes without running requests.",
        for_admins=True,
    ),
    Route(
        "POST",
        "/start_profile",
        admin.start_profile,
        "Traces the next steps of the scheduler.",
        StartProfileRequest,
        for_admins=True,
    ),
    Route(
        "POST",
        "/stop_profile",
        admin.stop_profile,
        "Stops the trace and writes it.",
        for_admins=True,
    ),
    Route(
        "POST",
        "/start_expert_distribution_record",
        admin.start_expert_record,
        "Begins a record of the load of routed experts.",
        for_admins=True,
    ),
    Route(
        "POST",
        "/stop_expert_distribution_record",
        admin.stop_expert_record,
        "Ends the record.",
        for_admins=True,
    ),
    Route(
        "POST",
        "/dump_expert_distribution_record",
        admin.dump_expert_record,
        "Writes the record to a file, for --init-expert-location.",
        for_admins=True,
    ),
    Route(
        "POST",
        "/abort_request",
        admin.abort_request,
        "Aborts one request, or all.",
        AbortRequest,
        for_admins=True,
    ),
    Route("GET", "/openapi.json", openapi.openapi, "This document."),
)
