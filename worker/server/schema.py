"""The requests that clients may send, as types; msgspec checks a body while it parses it.

Fields that are not listed are ignored, as OpenAI-compatible servers do. Fields that would change
the answer and that this version cannot honour are listed as `Any` and refused by name unless they
hold a value that means "off" (`NEUTRAL`): ignoring them would answer another question.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from mla_router.worker.server.errors import InvalidRequest

MAX_PROMPTS = 64  # in one HTTP request
MAX_CONTINUED_TOKENS = 1 << 20

PromptItems = list[str | int | list[int]]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class ContinuedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """What the client was given of one choice before its stream broke."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_CONTINUED_TOKENS)]
    finish_reason: Literal["stop", "length", "abort"] | None = None


class Continuation(msgspec.Struct, forbid_unknown_fields=True):
    """What a router adds to the body of a stream that broke; see replay.py."""

    response: Annotated[str, Meta(max_length=512, pattern="^[!-~]*$")]
    choices: Annotated[list[ContinuedChoice], Meta(max_length=MAX_PROMPTS)]


class SamplingFields(msgspec.Struct, kw_only=True):
    """What all generating endpoints spell alike."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    # refused unless neutral
    n: Any = None
    min_p: Any = None
    min_tokens: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class OpenAIFields(SamplingFields, kw_only=True):
    """What OpenAI's two endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    seed: int | None = None
    cache_salt: str | None = None
    continuation: Continuation | None = None
    response_format: Any = None

    @property
    def wants_usage(self) -> bool:
        """A stream ends with a chunk of token counts only if the client asked for it."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(OpenAIFields, kw_only=True):
    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    # refused unless neutral
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None


class CompletionRequest(OpenAIFields, kw_only=True):
    prompt: str | PromptItems | None = None
    logprobs: int | None = None
    # refused unless neutral
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class NativeSampling(SamplingFields, kw_only=True):
    max_new_tokens: int | None = None
    sampling_seed: int | None = None
    skip_special_tokens: Any = None
    no_stop_trim: Any = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """SGLang's native request."""

    text: str | list[str] | None = None
    input_ids: PromptItems | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    rid: str | None = None
    cache_salt: str | None = None
    continuation: Continuation | None = None
    # refused unless neutral
    logprob_start_len: Any = None
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None
    return_text_in_logprobs: Any = None
    return_hidden_states: Any = None
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None


class AbortRequest(msgspec.Struct):
    rid: str


# Values, besides null, that leave a field's feature off.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_calls": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "no_stop_trim": (False,),
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "return_text_in_logprobs": (False,),
    "return_hidden_states": (False,),
}

# Fields that are off only when they are null or absent.
NULL_ONLY = frozenset(
    {
        "regex",
        "ebnf",
        "json_schema",
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
            raise InvalidRequest(
                f"{prefix}{field}: not supported yet; leave it out",
                param=prefix + field,
                code="unsupported_parameter",
            )


# Where msgspec says that a value has the wrong type: "... - at `$.messages[0].role`".
_LOCATION = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")

Request = TypeVar("Request", bound=msgspec.Struct)


def parse(body: bytes, decoder: msgspec.json.Decoder[Request]) -> Request:
    """Parse and type-check a request body."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        location = _LOCATION.search(str(error))
        if location is None:
            raise InvalidRequest(f"The body has the wrong type: {error}") from None
        path = location["path"]
        raise InvalidRequest(f"{path}: {str(error)[: location.start()]}", param=path) from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None
