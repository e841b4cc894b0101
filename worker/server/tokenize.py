"""POST /tokenize and /detokenize: between text and token ids, in vLLM's shapes."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from mla_router.worker.server.body import read_body
from mla_router.worker.server.chat.run import rendered
from mla_router.worker.server.chat.tools import read_tools
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.prompts import check_ids
from mla_router.worker.server.responses import json_response
from mla_router.worker.server.schema.parse import parse
from mla_router.worker.server.schema.tokenize import DetokenizeRequest, TokenizeRequest
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.state import STATE


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None  # as the vocabulary writes them


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(request: web.Request) -> web.Response:
    """What /v1/completions would feed to the model, or /v1/chat/completions."""
    service = request.app[STATE].ready()
    body = parse(await read_body(request), _tokenize_decoder)
    if body.model is not None:
        service.check_model(body.model)
    refuse_unsupported(body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidField("prompt", "give either prompt or messages")
    tokenizer, context_length = service.tokenizer, service.limits.context_length
    text, special = body.prompt, True
    if text is None:
        chat = body.as_chat()
        text, special = await rendered(service, chat, read_tools(chat), "messages"), False
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    tokens = await tokenizer.encode(text, context_length=context_length, add_special_tokens=special)
    pieces = tokenizer.pieces_of(tokens) if body.return_token_strs else None
    return json_response(TokenizeResponse(len(tokens), context_length, tokens, pieces))


async def detokenize(request: web.Request) -> web.Response:
    """The inverse: special tokens are shown, too."""
    service = request.app[STATE].ready()
    body = parse(await read_body(request), _detokenize_decoder)
    if body.model is not None:
        service.check_model(body.model)
    if len(body.tokens) > service.limits.context_length:
        raise InvalidField("tokens", f"at most {service.limits.context_length}, the context length")
    if body.tokens:
        check_ids(body.tokens, service.limits.vocab_size, "tokens")
    return json_response(
        DetokenizeResponse(await asyncio.to_thread(service.tokenizer.decode, body.tokens))
    )
