"""The border check of sampling parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.generation import SamplingParams
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.schema.fields import SamplingFields
from mla_router.worker.server.validation.sampling import (
    CheckedSampling,
    NamedNumber,
    check_sampling,
    draw_seed,
)

VOCAB = 1000


def check(
    max_tokens: int | None = 5,
    seed: int | None = None,
    min_tokens: int | None = None,
    **fields: Any,
) -> CheckedSampling:
    return check_sampling(
        SamplingFields(**fields),
        max_tokens=NamedNumber("max_tokens", max_tokens),
        min_tokens=NamedNumber("min_tokens", min_tokens),
        seed=NamedNumber("seed", seed),
        vocab_size=VOCAB,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.01),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", ["a" * 257]),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [0] * 257),
        ("n", 0),
        ("n", 65),
        ("stream_interval", 0),
        ("stream_interval", 4097),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("min_tokens", 6),
        ("min_tokens", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.01),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", math.nan),
        ("presence_penalty", 2.01),
        ("presence_penalty", math.inf),
        ("logit_bias", {str(VOCAB): 1.0}),
        ("logit_bias", {" 1": 1.0}),
        ("logit_bias", {"01": 1.0}),
        ("logit_bias", {"1": -100.1}),
        ("logit_bias", {"1": math.nan}),
        ("logit_bias", {str(token): 1.0 for token in range(1025)}),
    ],
)
def test_out_of_range_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**{name: value})
    assert caught.value.body.error.param == name
    assert name in caught.value.body.error.message


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [1e-6, 2.0]),
        ("top_p", [1e-30, 1.0]),
        ("top_k", [1, VOCAB - 1]),
        ("min_p", [0.0, 1.0]),
        ("repetition_penalty", [1e-6, 2.0]),
        ("frequency_penalty", [-2.0, 2.0]),
        ("presence_penalty", [-2.0, 2.0]),
        ("min_tokens", [0, 5]),
        ("stop_token_ids", [frozenset({0, VOCAB - 1}), frozenset(range(256))]),
    ],
)
def test_the_first_and_the_last_value_in_range_reach_the_scheduler(
    name: str, values: list[Any]
) -> None:
    for value in values:
        sent = list(value) if isinstance(value, frozenset) else value
        assert getattr(check(**{name: sent}).params, name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [1, 2**31 - 1]),
        ("n", [1, 64]),
        ("stream_interval", [1, 4096]),
        ("stop", [("a",) * 16, ("a" * 256,)]),
        ("seed", [0, 2**63 - 1]),
    ],
)
def test_the_first_and_the_last_value_in_range_reach_the_server(
    name: str, values: list[Any]
) -> None:
    for value in values:
        sent = list(value) if isinstance(value, tuple) else value
        assert getattr(check(**{name: sent}), name) == value


def test_the_largest_number_of_biases_is_accepted() -> None:
    """The numbers are of a larger vocabulary: this one has fewer tokens than a request may bias."""
    fields = SamplingFields(logit_bias={str(token): 1.0 for token in range(1024)})
    checked = check_sampling(
        fields,
        max_tokens=NamedNumber("max_tokens", 1),
        vocab_size=2000,
    )
    assert len(checked.params.logit_bias) == 1024


@given(
    temperature=st.none() | st.floats() | st.integers().map(float),
    top_p=st.none() | st.floats(),
    top_k=st.none() | st.integers(),
    stop=st.none() | st.text() | st.lists(st.text()),
    stop_token_ids=st.none() | st.lists(st.integers()),
    max_tokens=st.none() | st.integers(),
    seed=st.none() | st.integers(),
    min_tokens=st.none() | st.integers(),
    min_p=st.none() | st.floats(),
    repetition_penalty=st.none() | st.floats() | st.floats(0, 3),
    frequency_penalty=st.none() | st.floats(-3, 3),
    presence_penalty=st.none() | st.floats(-3, 3),
    logit_bias=st.none()
    | st.dictionaries(st.text() | st.integers(0, VOCAB + 5).map(str), st.floats(-101, 101)),
)
def test_accepted_fields_are_in_range(**fields: Any) -> None:
    try:
        sampling = check(**fields)
    except InvalidRequest:
        return
    params = sampling.params
    assert params.temperature == 0.0 or 1e-6 <= params.temperature <= 2.0
    assert 0.0 < np.float32(params.top_p) <= 1.0, "as the device reads it"
    assert 0 <= params.top_k < VOCAB
    assert sampling.seed is None or 0 <= sampling.seed < 2**63
    assert sampling.max_tokens is None or 1 <= sampling.max_tokens < 2**31
    assert all(0 <= token < VOCAB for token in params.stop_token_ids)
    assert all(sampling.stop)
    assert 0.0 <= params.min_p <= 1.0
    assert 1e-6 <= params.repetition_penalty <= 2.0
    assert -2.0 <= params.frequency_penalty <= 2.0
    assert -2.0 <= params.presence_penalty <= 2.0
    assert 0 <= params.min_tokens <= (sampling.max_tokens or 2**31)
    assert all(0 <= token < VOCAB and -100 <= bias <= 100 for token, bias in params.logit_bias)
    assert len({token for token, _ in params.logit_bias}) == len(params.logit_bias)


def test_defaults_are_openais() -> None:
    sampling = check(max_tokens=None)
    assert sampling.params == SamplingParams(max_tokens=0, temperature=1.0)
    assert (sampling.stop, sampling.max_tokens, sampling.seed) == ((), None, None)


def test_a_message_names_the_range() -> None:
    for fields, words in (
        ({"top_p": 0.0}, "above 0 and at most 1"),
        ({"min_p": -0.5}, "between 0 and 1"),
        ({"max_tokens": 0}, "between 1 and 2147483647"),
        ({"min_tokens": 6}, "between 0 and max_tokens (5)"),
        ({"min_tokens": 2**31, "max_tokens": None}, "between 0 and 2147483647"),
        ({"stop_token_ids": [VOCAB]}, "between 0 and 999"),
        ({"logit_bias": {"x" * 99: 1.0}}, f"0 to 999; not '{'x' * 32}'"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check(**fields)
        assert words in caught.value.body.error.message


def test_the_smallest_seed_loses_its_sign() -> None:
    assert check(seed=-(2**63)).seed == 0


def test_switched_off_and_beyond_the_vocabulary() -> None:
    assert check(top_k=VOCAB).params.top_k == 0
    assert check(top_p=1e-40).params.top_p == 1e-30
    assert check(repetition_penalty=1e-40).params.repetition_penalty == 1e-6
    assert {check(top_k=off).params.top_k for off in (-1, 0, 10**40)} == {0}
    assert check(temperature=1e-45).params.temperature == 0.0


def test_biases_are_by_token_id() -> None:
    biases = {"7": -100.0, "0": 1.5, str(VOCAB - 1): 100.0}
    assert check(logit_bias=biases).params.logit_bias == ((7, -100), (0, 1.5), (VOCAB - 1, 100))
    assert check(logit_bias={}).params.logit_bias == ()


def test_all_wrong_keys_of_logit_bias_are_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(
            logit_bias={"bad1": 1.0, "7": 1.0, str(VOCAB): 1.0} | {f"k{n}": 1.0 for n in range(99)}
        )
    message = caught.value.body.error.message
    for named in ("bad1", str(VOCAB), "k0"):
        assert named in message
    assert len(message) < 500, "and not more of them than somebody wants to read"


def test_min_tokens_are_at_most_max_tokens_if_those_are_named() -> None:
    assert check(min_tokens=5).params.min_tokens == 5
    assert check(max_tokens=None, min_tokens=500).params.min_tokens == 500


def test_seeds() -> None:
    assert check(seed=7).seed == 7
    assert check(seed=-1).seed == 2**63 - 1
    assert draw_seed(7, 42) == (7, 0)
    assert draw_seed(0, 42) == (0, 0)
    assert draw_seed(None, 42) == (42, 0)
    assert draw_seed(None, 0) != draw_seed(None, 0)
    assert draw_seed(None, 0)[1] == 1, "prompts of a batch differ"
