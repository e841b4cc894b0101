"""The packed integers of a plan."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.engine.inputs import InputPacker
from mla_router.worker.engine.slots import SlotState
from mla_router.worker.generation import SamplingParams
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import Admitted, PrefillChunk, RowKind, StepPlan

CPU = torch.device("cpu")
IDLE = 5
CAPACITY = Capacity(num_pages=20, page_size=4, num_slots=IDLE, context_length=16)
LENGTHS_AT = 4 * (IDLE + 1)  # behind the page table
DECODE, EXTEND, PADDING = RowKind.DECODE, RowKind.EXTEND, RowKind.IDLE
PLAN = StepPlan(
    decode_slots=(3, 1),
    decode_bounds=(10, 5),
    chunks=(
        PrefillChunk(slot=0, start=4, tokens=(7, 8, 9), is_last=True),
        PrefillChunk(2, 0, (5, 6), is_last=False, logprob_start=1, logprob_tokens=(8,)),
    ),
    page_writes=((0, 1, 11), (2, 0, 12), (3, 2, 13), (1, 1, 14), (0, 0, 15)),
    admitted=(
        Admitted(0, SamplingParams(9), [1]),
        Admitted(2, SamplingParams(3), [1]),
    ),
)


def packer() -> InputPacker:
    return InputPacker(CPU, SlotState(CAPACITY, CPU))


def test_each_token_has_its_kind_slot_and_length() -> None:
    inputs = packer().pack_rows(PLAN, 7)
    assert inputs.rows.tolist() == [
        [3, 1, 0, 0, 0, 2, 2],
        [10, 5, 5, 6, 7, 1, 2],
        [0, 0, 7, 8, 9, 5, 6],
    ]
    assert inputs.kinds.tolist() == [DECODE] * 2 + [EXTEND] * 5


def test_padding_rows_are_in_the_idle_slot() -> None:
    inputs = packer().pack_rows(PLAN, 10)
    assert inputs.rows[0, 7:].tolist() == [IDLE] * 3
    assert inputs.kinds[7:].tolist() == [PADDING] * 3
    assert inputs.rows[:, :7].tolist() == packer().pack_rows(PLAN, 7).rows.tolist()


def test_a_prompt_is_packed_as_slot_length_and_tokens() -> None:
    prompt = PrefillChunk(3, 0, (7, 8, 9), is_last=True)
    writes = ((3, 0, 11), (3, 1, 12))
    inputs = packer().pack_prompt(StepPlan((), (), (prompt,), writes, ()), 8)
    assert inputs.size == 8
    assert inputs.prompt.tolist() == [3, 3, 7, 8, 9]
    assert inputs.entries.tolist() == [12, 13, LENGTHS_AT + 3]
    assert inputs.values.tolist() == [11, 12, 3]


def test_outputs_are_sampled_rows_then_those_with_logprobs() -> None:
    outputs = packer().pack_outputs(PLAN)
    assert outputs.rows.tolist() == [0, 1, 4, 6]
    assert outputs.slots.tolist() == list(PLAN.sampled_slots)
    assert outputs.logprob_tokens.tolist() == [8]


def test_slots_keep_pages_tokens_and_lengths() -> None:
    state = SlotState(CAPACITY, CPU)
    state.last_token[3], state.last_token[1] = 33, 31
    state.lengths[3], state.lengths[1] = 10, 5
    inputs = packer().pack_rows(PLAN, 8)
    state.write(inputs.entries, inputs.values)
    state.check(PLAN)
    rows = state.look_up(inputs.rows, inputs.kinds)
    assert rows.tokens.tolist() == [33, 31, 7, 8, 9, 5, 6, 0]
    assert rows.positions.tolist() == [9, 4, 4, 5, 6, 0, 1, 0]
    assert rows.lengths.tolist() == [10, 5, 5, 6, 7, 1, 2, 1]
    # position 9 of slot 3 is in its page 2, position 4 of slots 1 and 0 in their page 1
    want = [13 * 4 + 1, 14 * 4, 11 * 4, 11 * 4 + 1, 11 * 4 + 2, 12 * 4, 12 * 4 + 1, 0]
    assert rows.out_cache_loc.tolist() == want
    # The chunk of slot 0 is the last of its request; that of slot 2 is not
    assert state.lengths.tolist() == [7, 5, 1, 10, 1, 1]
    state.lengths[3] += 1
    with pytest.raises(AssertionError, match=r"\(11, 5\) tokens"):
        state.check(PLAN)


def test_a_step_of_decode_rows_is_packed() -> None:
    inputs = packer().pack_rows(StepPlan((2,), (7,), (), (), ()), 1)
    assert inputs.rows.tolist() == [[2], [7], [0]]
    assert len(inputs.entries) == len(inputs.values) == 0
