"""The acceptance of drafts against a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.kernels.sampling.accept import accept_torch, accept_triton
from mla_router.worker.step.result import NO_TOKEN, UNUSED
from support.examples import examples
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

SLOTS = 9


@pytest.mark.parametrize("op", [accept_torch, accept_triton])
@examples(40)
@given(
    decodes=st.integers(0, 5),
    others=st.integers(0, 3),
    drafts=st.integers(1, 4),
    number=st.integers(0, 999),
)
def test_as_a_loop(
    op: Callable[..., None], decodes: int, others: int, drafts: int, number: int
) -> None:
    """Few different tokens, so that many drafts are right; some rows have no token, some slots have no room."""
    draw = torch.Generator().manual_seed(number)
    rows = 1 + drafts

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw)

    slots = torch.randperm(SLOTS, generator=draw)[: decodes + others]
    sampled = integers(NO_TOKEN, 3, decodes * rows + others).int()
    drafted, lengths = integers(0, 3, SLOTS, 4), integers(1, 50, SLOTS).int()
    last_token = torch.full((SLOTS,), 99)
    bounds = lengths[slots[:decodes]].long() + integers(0, rows + 2, decodes)
    out = torch.full((len(slots), rows), 7, dtype=torch.int32, device=DEVICE)
    last_rows = torch.empty(len(slots), dtype=torch.int64, device=DEVICE)
    state = drafted.to(DEVICE), lengths.clone().to(DEVICE), last_token.clone().to(DEVICE)
    op(sampled.to(DEVICE), slots.to(DEVICE), bounds.to(DEVICE), *state, out, last_rows)

    for at, slot in enumerate(slots.tolist()):
        first = at * rows if at < decodes else decodes * rows + at - decodes
        length, gained = int(lengths[slot]), [int(sampled[first])]
        while (
            at < decodes
            and len(gained) < rows
            and gained[-1] == int(drafted[slot, len(gained) - 1])
            and length + len(gained) <= int(bounds[at])
        ):
            gained.append(int(sampled[first + len(gained)]))
        assert out[at].tolist() == gained + [UNUSED] * (rows - len(gained))
        assert last_rows[at] == first + len(gained) - 1
        assert state[1][slot] == length + len(gained)
        assert state[2][slot] == max(0, gained[-1])
    untouched = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
    assert torch.equal(state[1].cpu()[untouched], lengths[untouched])
    assert torch.equal(state[2].cpu()[untouched], last_token[untouched])


def launches() -> None:
    with torch.device("meta"):
        numbers = torch.empty(132, dtype=torch.int64)
        out = torch.empty(33, 4, dtype=torch.int32)
        by_slot = numbers[:33], numbers[:33], torch.empty(1024, 3, dtype=torch.int64)
        state = torch.empty(1024, dtype=torch.int32), torch.empty(1024, dtype=torch.int64)
        accept_triton(numbers.int(), *by_slot, *state, out, numbers[:33])


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
