"""Drafts that are looked up, against a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.sampling.ngram import (
    MAX_MATCH,
    MIN_MATCH,
    MIN_PREDICTED_MATCH,
    draft_ngrams_torch,
    draft_ngrams_triton,
)
from support.examples import examples
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

SLOTS, HISTORY, MOST = 6, 60, 40


def looked_up(own: list[int], prompt: int, prediction: list[int], count: int) -> list[int]:
    """Returns `count` drafts behind `own` tokens, of which `prompt` are of the prompt."""
    tail: list[int | None] = [*own]
    source: list[int | None] = [*own]
    if prediction:  # None stands for the beginning of the answer, many times
        tail, source = [*[None] * MAX_MATCH, *own[prompt:]], [*[None] * MAX_MATCH, *prediction]
    begin = MAX_MATCH if prediction else 0

    def run(at: int) -> int:
        equal = 0
        while equal < min(MAX_MATCH, at, len(tail)) and source[at - 1 - equal] == tail[-1 - equal]:
            equal += 1
        return equal

    places = range(begin, len(source))
    best = max(places, key=lambda at: (run(at), -at if prediction else at))
    if run(best) < (MIN_PREDICTED_MATCH if prediction else MIN_MATCH):
        best = begin + min(len(own) - prompt, len(prediction) - 1) if prediction else 0
    behind = source[best:]
    return [int(behind[i % len(behind)] or 0) for i in range(count)]


@pytest.mark.parametrize("op", [draft_ngrams_torch, draft_ngrams_triton])
@examples(40)
@given(
    decodes=st.integers(0, 3),
    others=st.integers(0, 3),
    most=st.integers(1, 4),
    has_last=st.booleans(),
    number=st.integers(0, 9999),
)
def test_as_a_loop(
    op: Callable[..., None], decodes: int, others: int, most: int, has_last: bool, number: int
) -> None:
    """Few different tokens, so that there are many runs."""
    draw = torch.Generator().manual_seed(number)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw)

    rows = 1 + most if has_last else 1
    slots = torch.randperm(SLOTS, generator=draw)[: decodes + others]
    text = integers(0, 4, SLOTS, HISTORY + MOST).int()
    starts = integers(1, 30, SLOTS).int()
    lengths = starts + integers(rows, 20, SLOTS).int()
    predicted = integers(0, 2, SLOTS).int() * integers(1, MOST + 1, SLOTS).int()
    tokens = integers(0, 4, decodes * rows + others)
    accepted = integers(0, rows, decodes)
    last = torch.cat(
        (torch.arange(decodes) * rows + accepted, decodes * rows + torch.arange(others))
    )
    drafts = torch.full((SLOTS, most), 99)
    state = text.to(DEVICE, copy=True), drafts.to(DEVICE, copy=True)
    op(
        tokens.to(DEVICE),
        slots.to(DEVICE),
        last.to(DEVICE) if has_last else None,
        lengths.to(DEVICE),
        starts.to(DEVICE),
        predicted.to(DEVICE),
        *state,
        decodes=decodes,
        rows=rows,
        history=HISTORY,
    )
    expected = drafts.clone()
    for at, slot in enumerate(slots.tolist()):
        first = at * rows if at < decodes else decodes * rows + at - decodes
        new = tokens[first : int(last[at]) + 1].tolist()
        length, prediction = int(lengths[slot]), text[slot, HISTORY:][: int(predicted[slot])]
        own = text[slot, : length - len(new)].tolist() + new
        found = looked_up(own, int(starts[slot]), prediction.tolist(), most)
        expected[slot] = torch.tensor(found)
        assert state[0][slot, :length].tolist() == own
    assert state[1].tolist() == expected.tolist()


def launches() -> None:
    with torch.device("meta"):
        numbers, state = torch.empty(132, dtype=torch.int64), torch.empty(64, dtype=torch.int32)
        text = torch.empty(64, 9000, dtype=torch.int32)
        drafts = torch.empty(64, 3, dtype=torch.int64)
        for last, rows in ((numbers[:33], 4), (None, 1)):
            draft_ngrams_triton(
                numbers[: 33 * rows],
                numbers[:33],
                last,
                state,
                state,
                state,
                text,
                drafts,
                decodes=33,
                rows=rows,
                history=5000,
            )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
