"""POST /tokenize and /detokenize, in the forms of vLLM and SGLang."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
from aiohttp import web

from mla_router.worker.server.endpoints.chat.media import prompt_tokens
from mla_router.worker.server.endpoints.chat.tools import read_tools
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.http.json_response import json_response
from mla_router.worker.server.http.parsed_body import read_parsed
from mla_router.worker.server.schema.continuation import MAX_PROMPTS
from mla_router.worker.server.schema.tokenize import DetokenizeRequest, TokenizeRequest
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.state import STATE
from mla_router.worker.server.validation.prompts import check_ids


class TokenizeResponse(msgspec.Struct, frozen=True):
    """The tokens of one prompt. For several prompts each field except `max_model_len` is a list with one entry for each
    prompt."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int | list[int]]
    token_strs: list[str | list[str]] | None  # in the spelling of the vocabulary


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str | list[str]  # vLLM's name
    text: str | list[str]  # SGLang's


class TokenizerInfo(msgspec.Struct, frozen=True):
    tokenizer_class: str  # transformers' name
    model_max_length: int
    chat_template: str
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(request: web.Request) -> web.Response:
    """Returns the token ids that /v1/completions or /v1/chat/completions would compute."""
    service = request.app[STATE].ready()
    body = await read_parsed(request, _tokenize_decoder)
    service.check_model(body.model)
    refuse_unsupported(body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidField("prompt", "give either prompt or messages")
    tokenizer, context_length = service.tokenizer, service.limits.context_length
    several = isinstance(body.prompt, list)
    tokens: list[Any]
    if body.prompt is None:
        chat, special = body.as_chat(), bool(body.add_special_tokens)
        tools = read_tools(chat)
        tokens = [await prompt_tokens(service, chat, tools, "messages", add_special_tokens=special)]
    else:
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if len(texts) > MAX_PROMPTS:
            raise InvalidField("prompt", f"at most {MAX_PROMPTS} prompts")
        special = body.add_special_tokens is not False
        tokens = [
            await tokenizer.encode(
                text, context_length=context_length, add_special_tokens=special, field="prompt"
            )
            for text in texts
        ]
    pieces: list[Any] | None = None
    if body.return_token_strs:
        pieces = [tokenizer.pieces_of(ids) for ids in tokens]
    if several:
        counts = [len(ids) for ids in tokens]
        return json_response(TokenizeResponse(counts, context_length, tokens, pieces))
    one = TokenizeResponse(len(tokens[0]), context_length, tokens[0], pieces and pieces[0])
    return json_response(one)


async def tokenizer_info(request: web.Request) -> web.Response:
    """Returns special tokens and chat template, for clients that render chats, such as lm-eval."""
    service = request.app[STATE].ready()
    tokenizer = service.tokenizer
    special = {
        name: token
        for name, token in tokenizer.special_tokens.items()
        if name in TokenizerInfo.__struct_fields__
    }
    info = TokenizerInfo(
        tokenizer.kind, service.limits.context_length, tokenizer.template.text, **special
    )
    return json_response(info)


async def detokenize(request: web.Request) -> web.Response:
    """Returns the text of token ids, with special tokens unless the request skips them."""
    service = request.app[STATE].ready()
    body = await read_parsed(request, _detokenize_decoder)
    service.check_model(body.model)
    several = bool(body.tokens) and all(isinstance(item, list) for item in body.tokens)
    lists = cast("list[list[int]]", body.tokens if several else [body.tokens])
    if not several and any(isinstance(item, list) for item in body.tokens):
        raise InvalidField("tokens", "do not mix ids and lists of ids")
    if len(lists) > MAX_PROMPTS:
        raise InvalidField("tokens", f"at most {MAX_PROMPTS} lists")
    for ids in lists:
        if len(ids) > service.limits.context_length:
            raise InvalidField(
                "tokens", f"at most {service.limits.context_length}, the context length"
            )
        if ids:
            check_ids(ids, service.limits.vocab_size, "tokens")
    decode = (
        service.tokenizer.decode_shown if body.skip_special_tokens else service.tokenizer.decode
    )
    texts = [await asyncio.to_thread(decode, ids) for ids in lists]
    text = texts if several else texts[0]
    return json_response(DetokenizeResponse(text, text))
