"""Checks the sampling fields of a request, for all endpoints.

After this check numbers are finite and in range, and token ids are within the vocabulary.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from mla_router.worker.generation import SamplingParams
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.schema.continuation import MAX_PROMPTS
from mla_router.worker.server.schema.fields import SamplingFields
from mla_router.worker.server.schema.response_format import ResponseFormat
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.text.stop_regex import StopPatterns
from mla_router.worker.server.validation.allowed_tokens import AllowedTokens
from mla_router.worker.server.validation.constraint import Constraint
from mla_router.worker.server.validation.constraint_fields import read_constraint

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
# The device reserves room for the longest list of any request, in every request slot.
MAX_LOGIT_BIASES = 1024
SHOWN_KEYS, SHOWN_CHARS = 8, 32  # limits of the wrong keys in an error message
MAX_INT = 2**31 - 1
MAX_STREAM_INTERVAL = 4096

# Below this, logits divided by the temperature overflow. Sampling is greedy there anyway.
MIN_TEMPERATURE = 1e-6
MIN_TOP_P = 1e-30  # positive in float32; smaller values select the same single token
# Below this, a logit divided by the penalty may overflow. Repeated tokens win there anyway.
MIN_REPETITION_PENALTY = 1e-6


@dataclass(frozen=True, slots=True)
class CheckedSampling:
    """The checked sampling fields of a request. `params` lacks the token limit, the seed and the model's EOS tokens:
    `params_of` adds them for each choice."""

    params: SamplingParams
    max_tokens: int | None  # None: the endpoint's default, or the remaining context
    max_tokens_field: str  # the client's field, for error messages
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    stop_regex: StopPatterns | None
    n: int  # answers to each prompt
    skip_special_tokens: bool  # special tokens have no text
    keep_stop: bool  # the text includes the stop string or stop token
    constraint: Constraint | None  # the grammar of the answers
    allowed: AllowedTokens | None  # None: all tokens
    stream_interval: int | None  # tokens; None: the worker's --stream-interval

    def params_of(self, *, max_tokens: int, seed: int, eos_ids: frozenset[int]) -> SamplingParams:
        """Returns the scheduler's parameters of one choice.

        Raises InvalidField if the fields may leave no token to sample.
        """
        stop_ids = self.params.stop_token_ids | (frozenset() if self.ignore_eos else eos_ids)
        if self.allowed is not None and self.constraint is not None:
            raise self.allowed.refused(f"cannot be combined with {self.constraint.field}")
        if self.allowed is not None and self.params.min_tokens and self.allowed.ids <= stop_ids:
            raise self.allowed.refused(
                "all of these tokens end the answer, but min_tokens forbids that"
            )
        return msgspec.structs.replace(
            self.params, max_tokens=max_tokens, seed=seed, stop_token_ids=stop_ids
        )


class NamedNumber(NamedTuple):
    """A number of a request, and the client's field that has it."""

    field: str
    value: int | None = None


class WantedLogprobs(NamedTuple):
    """The log-probabilities that a request asks for."""

    of_answer: bool = False
    top: int = 0  # number of most likely tokens for each token
    # First prompt token with a logprob; None: no prompt token has one
    prompt_from: int | None = None


# Requests without these fields
MIN_TOKENS = NamedNumber("min_tokens")
SEED = NamedNumber("seed")
NO_LOGPROBS = WantedLogprobs()


def check_sampling(
    fields: SamplingFields,
    *,
    max_tokens: NamedNumber,
    min_tokens: NamedNumber = MIN_TOKENS,
    seed: NamedNumber = SEED,
    stop_field: str = "stop",
    logprobs: WantedLogprobs = NO_LOGPROBS,
    vocab_size: int,
    response_format: ResponseFormat | None = None,
    prefix: str = "",
) -> CheckedSampling:
    """Checks `fields`. The other arguments have different names in the endpoints. `prefix` is the path of `fields` in
    the body. Raises InvalidRequest, which names the field."""
    refuse_unsupported(fields, prefix)
    _check_counts(max_tokens, min_tokens, seed)
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= MAX_PROMPTS:
        raise InvalidField(prefix + "n", f"must be between 1 and {MAX_PROMPTS}")
    interval = fields.stream_interval
    if interval is not None and not 1 <= interval <= MAX_STREAM_INTERVAL:
        raise InvalidField(
            prefix + "stream_interval", f"must be between 1 and {MAX_STREAM_INTERVAL}"
        )
    allowed = AllowedTokens.read(fields.allowed_token_ids, vocab_size, prefix + "allowed_token_ids")
    params = msgspec.structs.replace(
        _params(fields, vocab_size, prefix),
        min_tokens=min_tokens.value or 0,
        logprobs=logprobs.of_answer,
        top_logprobs=logprobs.top,
        prompt_logprobs_from=logprobs.prompt_from,
        allowed=b"" if allowed is None else allowed.bits,
    )
    return CheckedSampling(
        params=params,
        max_tokens=max_tokens.value,
        max_tokens_field=max_tokens.field,
        seed=None if seed.value is None else seed.value & (2**63 - 1),
        stop=_stop_strings(fields.stop, prefix + stop_field),
        ignore_eos=bool(fields.ignore_eos),
        stop_regex=StopPatterns.read(fields.stop_regex, prefix + "stop_regex"),
        n=n,
        skip_special_tokens=fields.skip_special_tokens is not False,
        keep_stop=bool(fields.no_stop_trim or fields.include_stop_str_in_output),
        constraint=read_constraint(fields, response_format, prefix),
        allowed=allowed,
        stream_interval=interval,
    )


def _check_counts(max_tokens: NamedNumber, min_tokens: NamedNumber, seed: NamedNumber) -> None:
    most, least = max_tokens.value, min_tokens.value
    if most is not None and not 1 <= most <= MAX_INT:
        raise InvalidField(max_tokens.field, f"must be between 1 and {MAX_INT}")
    if least is not None and not 0 <= least <= (most or MAX_INT):
        bound = MAX_INT if most is None else f"{max_tokens.field} ({most})"
        raise InvalidField(min_tokens.field, f"must be between 0 and {bound}")
    if seed.value is not None and not -(2**63) <= seed.value < 2**63:
        raise InvalidField(seed.field, "must fit in 64 bits")


def _params(fields: SamplingFields, vocab_size: int, prefix: str) -> SamplingParams:
    """Returns the parameters of the draw and of the logits."""
    temperature = _within(fields.temperature, 1.0, 0.0, 2.0, prefix + "temperature")
    top_p = _within(fields.top_p, 1.0, 0.0, 1.0, prefix + "top_p", above=True)
    top_k = 0 if fields.top_k is None else fields.top_k
    if top_k < -1:
        raise InvalidField(prefix + "top_k", "must be at least 1, or 0 or -1 to switch it off")
    repetition_penalty = _within(
        fields.repetition_penalty, 1.0, 0.0, 2.0, prefix + "repetition_penalty", above=True
    )
    return SamplingParams(
        max_tokens=0,
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_k=0 if top_k < 1 or top_k >= vocab_size else top_k,
        top_p=max(top_p, MIN_TOP_P),
        min_p=_within(fields.min_p, 0.0, 0.0, 1.0, prefix + "min_p"),
        repetition_penalty=max(repetition_penalty, MIN_REPETITION_PENALTY),
        frequency_penalty=_within(
            fields.frequency_penalty, 0.0, -2.0, 2.0, prefix + "frequency_penalty"
        ),
        presence_penalty=_within(
            fields.presence_penalty, 0.0, -2.0, 2.0, prefix + "presence_penalty"
        ),
        logit_bias=_logit_bias(fields.logit_bias, vocab_size, prefix + "logit_bias"),
        stop_token_ids=_stop_ids(fields.stop_token_ids, vocab_size, prefix + "stop_token_ids"),
    )


def draw_seed(given: int | None, configured: int) -> tuple[int, int]:
    """Returns the seed of a request and its `Origin.seed_step`.

    All prompts share a seed from the client or the configuration. Else each prompt has its own random seed.
    """
    if given is not None:
        return given, 0
    return (configured, 0) if configured else (secrets.randbits(63), 1)


def _within(
    value: float | None, default: float, low: float, high: float, field: str, *, above: bool = False
) -> float:
    """Returns `value`, or `default` if it is None. `above`: `low` itself is out of range. Raises InvalidField."""
    if value is None:
        return default
    if not low <= value <= high or (above and value == low):  # NaN is in no range
        bounds = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
        raise InvalidField(field, f"must be {bounds}")
    return value


def _logit_bias(
    biases: dict[str, float] | None, vocab_size: int, field: str
) -> tuple[tuple[int, float], ...]:
    if biases is None:
        return ()
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidField(field, f"at most {MAX_LOGIT_BIASES} tokens, got {len(biases)}")
    wrong = [key for key in biases if not _is_token_id(key, vocab_size)]
    if wrong:
        named = ", ".join(repr(key[:SHOWN_CHARS]) for key in wrong[:SHOWN_KEYS])
        raise InvalidField(
            field,
            f"keys must be ids of the {vocab_size} tokens, 0 to {vocab_size - 1}; not {named}",
        )
    checked = []
    for key, bias in biases.items():
        if not -100.0 <= bias <= 100.0:
            raise InvalidField(field, f"the bias of token {key} must be between -100 and 100")
        checked.append((int(key), bias))
    return tuple(checked)


def _is_token_id(key: str, vocab_size: int) -> bool:
    """Returns whether `key` is a token id in canonical form, so that no token occurs twice."""
    is_number = len(key) <= len(str(vocab_size)) and key.isascii() and key.isdecimal()
    return is_number and str(int(key)) == key and int(key) < vocab_size


def _stop_strings(stop: str | list[str] | None, field: str) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidField(field, f"at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise InvalidField(field, f"each string must have 1 to {MAX_STOP_LENGTH} characters")
    return strings


def _stop_ids(ids: list[int] | None, vocab_size: int, field: str) -> frozenset[int]:
    if ids is None:
        return frozenset()
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidField(field, f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
    if any(not 0 <= token < vocab_size for token in ids):
        raise InvalidField(field, f"ids must be between 0 and {vocab_size - 1}")
    return frozenset(ids)
