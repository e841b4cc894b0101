"""`allowed_token_ids`, from the body to the scheduler. tests/engine/sampling tests its effect on the logits."""

from __future__ import annotations

from typing import Any

import pytest

from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.schema.fields import SamplingFields
from mla_router.worker.server.validation.sampling import (
    CheckedSampling,
    NamedNumber,
    check_sampling,
)

VOCAB = 1003  # no multiple of 8
EOS = frozenset([1])


def check(min_tokens: int | None = None, **fields: Any) -> CheckedSampling:
    return check_sampling(
        SamplingFields(**fields),
        max_tokens=NamedNumber("max_tokens", 5),
        min_tokens=NamedNumber("min_tokens", min_tokens),
        vocab_size=VOCAB,
        prefix="sampling_params.",
    )


def bits_of(sampling: CheckedSampling) -> set[int]:
    allowed = sampling.params_of(max_tokens=5, seed=0, eos_ids=EOS).allowed
    return {t for t in range(8 * len(allowed)) if allowed[t // 8] >> t % 8 & 1}


@pytest.mark.parametrize("ids", [[0], [1], [5, 5, 7, 8], [VOCAB - 1], list(range(VOCAB))])
def test_each_id_is_a_bit(ids: list[int]) -> None:
    assert bits_of(check(allowed_token_ids=ids)) == set(ids)


def test_all_tokens_are_allowed_where_nothing_is_said() -> None:
    assert check().params.allowed == check(allowed_token_ids=None).params.allowed == b""


@pytest.mark.parametrize("ids", [[], [-1], [VOCAB], [10**20], [0] * (VOCAB + 1)])
def test_wrong_ids_are_refused_by_name(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(allowed_token_ids=ids)
    assert caught.value.body.error.param == "sampling_params.allowed_token_ids"


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 1, "allowed_token_ids": [1]},
        {"min_tokens": 1, "allowed_token_ids": [1, 7], "stop_token_ids": [7, 8]},
        {"allowed_token_ids": [1, 7], "regex": "a+"},
    ],
)
def test_sets_without_a_possible_token_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**fields).params_of(max_tokens=5, seed=0, eos_ids=EOS)
    assert caught.value.body.error.param == "sampling_params.allowed_token_ids"


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 1, "allowed_token_ids": [1, 7]},
        {"min_tokens": 0, "allowed_token_ids": [1]},
        {"min_tokens": 1, "allowed_token_ids": [1], "ignore_eos": True},
    ],
)
def test_sets_with_a_possible_token_are_accepted(fields: dict[str, Any]) -> None:
    check(**fields).params_of(max_tokens=5, seed=0, eos_ids=EOS)
