"""The packed integers of a plan."""

from __future__ import annotations

import torch

from mla_router.worker.core import Admitted, Capacity, PrefillChunk, SamplingParams, StepPlan
from mla_router.worker.engine.inputs import InputPacker
from mla_router.worker.engine.slots import SlotState

CPU = torch.device("cpu")
IDLE = 5
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


def test_each_token_has_its_slot_and_position() -> None:
    inputs = InputPacker(CPU, 4, IDLE).pack_rows(PLAN, 7)
    assert inputs.rows.tolist() == [
        [0, 0, 7, 8, 9, 5, 6],
        [3, 1, 0, 0, 0, 2, 2],
        [9, 4, 4, 5, 6, 0, 1],
    ]
    assert all(row.data_ptr() % 16 == inputs.rows.data_ptr() % 16 for row in inputs.rows)


def test_padding_rows_are_in_the_idle_slot() -> None:
    inputs = InputPacker(CPU, 4, IDLE).pack_rows(PLAN, 10)
    assert inputs.rows[:, 7:].tolist() == [[0] * 3, [IDLE] * 3, [0] * 3]
    assert inputs.rows[:, :7].tolist() == InputPacker(CPU, 4, IDLE).pack_rows(PLAN, 7).rows.tolist()


def test_a_prompt_is_packed_as_slot_length_and_tokens() -> None:
    prompt = PrefillChunk(3, 0, (7, 8, 9), is_last=True)
    writes = ((3, 0, 11), (3, 1, 12))
    inputs = InputPacker(CPU, 4, IDLE).pack_prompt(StepPlan((), (), (prompt,), writes, ()), 8)
    assert inputs.size == 8
    assert inputs.prompt.tolist() == [3, 3, 7, 8, 9]
    assert inputs.page_entries.tolist() == [12, 13]
    assert inputs.pages.tolist() == [11, 12]


def test_outputs_are_sampled_rows_then_those_with_logprobs() -> None:
    outputs = InputPacker(CPU, 4, IDLE).pack_outputs(PLAN)
    assert outputs.rows.tolist() == [0, 1, 4, 6]
    assert outputs.slots.tolist() == list(PLAN.sampled_slots)
    assert outputs.lengths.tolist() == [10, 5, 7]
    assert outputs.logprob_tokens.tolist() == [8]


def test_slots_keep_pages_and_tokens() -> None:
    state = SlotState(Capacity(num_pages=20, page_size=4, num_slots=5, context_length=16), CPU)
    state.last_token[3], state.last_token[1] = 33, 31
    inputs = InputPacker(CPU, 4, IDLE).pack_rows(PLAN, 7)
    state.write_pages(inputs.page_entries, inputs.pages)
    state.read_last_tokens(inputs.rows, 2)
    tokens, slots, positions = inputs.rows.unbind()
    assert tokens.tolist() == [33, 31, 7, 8, 9, 5, 6]
    # position 9 of slot 3 is in its page 2, position 4 of slots 1 and 0 in their page 1
    want = [13 * 4 + 1, 14 * 4, 11 * 4, 11 * 4 + 1, 11 * 4 + 2, 12 * 4, 12 * 4 + 1]
    assert state.locations(slots, positions).tolist() == want


def test_a_step_of_decode_rows_is_packed() -> None:
    inputs = InputPacker(CPU, 4, IDLE).pack_rows(StepPlan((2,), (7,), (), (), ()), 1)
    assert inputs.rows.tolist() == [[0], [2], [6]]
    assert len(inputs.page_entries) == len(inputs.pages) == 0
