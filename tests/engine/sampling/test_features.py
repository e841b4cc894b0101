"""The features of a row, by which the sampler leaves out work."""

from __future__ import annotations

from typing import Any

import pytest

from mla_router.worker.engine.sampling.features import SlotFeatures
from mla_router.worker.generation import SamplingParams
from mla_router.worker.step.plan import Admitted, StepPlan


@pytest.mark.parametrize(
    ("fields", "filtered"),
    [
        ({}, False),
        ({"temperature": 0.0}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"top_k": 5, "temperature": 0.0}, False),
    ],
)
def test_a_greedy_row_needs_no_filter(fields: dict[str, Any], filtered: bool) -> None:
    features = SlotFeatures(4)
    sampling = SamplingParams(max_tokens=9, **{"temperature": 1.0} | fields)
    features.admit([Admitted(2, sampling, [1, 2], [])])
    assert features.of(StepPlan((2,), (3,), (), (), ())).filtered is filtered
