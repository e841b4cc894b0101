"""Engine calls survive the wire, and no method of an engine is forgotten."""

from __future__ import annotations

import dataclasses
import inspect

import msgspec
import numpy as np
import pytest

from mla_router.worker.engine.engine import Engine
from mla_router.worker.generation import SamplingParams
from mla_router.worker.mask_memory import STEPS, MaskMemory
from mla_router.worker.ranks import calls
from mla_router.worker.ranks.calls import (
    ENGINE_CALLS,
    Encode,
    EncodeLayers,
    Forward,
    Masks,
    Sample,
    decode,
    encode,
)
from mla_router.worker.ranks.errors import CallError
from mla_router.worker.step.engine import StepEngine
from mla_router.worker.step.plan import (
    Admitted,
    GroupStep,
    ImageRows,
    PrefillChunk,
    StepPlan,
    TokenMasks,
)

# The other public methods of an engine, and the reason why no call is sent.
LOCAL = {
    "capture_graphs": "each rank captures at its start, with the same settings",
    "report_progress_within_steps": "each rank has its own heartbeat",
    "is_usable_after": "changes nothing; no step follows a failed one",
}
# Every field differs from its default.
SAMPLING = SamplingParams(
    max_tokens=9,
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    seed=2**62,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    presence_penalty=0.3,
    logit_bias=((5, -1.5),),
    min_tokens=2,
    stop_token_ids=frozenset((0, 1)),
    logprobs=True,
    top_logprobs=4,
    prompt_logprobs_from=1,
    allowed=b"\x01\xff",
)
PLAN = StepPlan(
    decode_slots=(3, 1),
    decode_bounds=(17, 2**31),
    chunks=(
        PrefillChunk(2, 4, (7, 8), True, 1, (8,), (ImageRows(0, 2**62, 3, 1),)),
        PrefillChunk(0, 0, (9,), False),
    ),
    page_writes=((3, 1, 5), (2, 0, 6)),
    admitted=(
        Admitted(2, SAMPLING, [1, 2, 3], [4], [5, 6]),
        Admitted(0, SamplingParams(1), [9], [], []),
    ),
    group=GroupStep((5, 0), decode=False),
    num_drafts=2,
    tree_nodes=4,
    feeds_drafter=True,
    draft_bounds=(19, 0, 7),
    returns_drafts=True,
)


def methods(of: type) -> set[str]:
    return {
        name
        for name, member in inspect.getmembers(of, inspect.isfunction)
        if not name.startswith("_")
    }


def test_every_method_that_changes_an_engine_is_a_call() -> None:
    assert methods(Engine) == set(ENGINE_CALLS) | set(LOCAL)
    assert methods(StepEngine) <= set(ENGINE_CALLS) | set(LOCAL)
    assert set(ENGINE_CALLS.values()) == {Forward, Sample, Encode, EncodeLayers}
    assert set(ENGINE_CALLS.values()) == set(calls.EngineCall.__args__)


def test_a_call_has_the_arguments_of_its_method() -> None:
    """The output of `forward` is no argument of a call, because it stays on its rank."""
    for name, call in ENGINE_CALLS.items():
        taken = set(inspect.signature(getattr(Engine, name)).parameters) - {"self", "forward"}
        assert set(call.__struct_fields__) == taken


def test_a_plan_survives_the_wire() -> None:
    assert decode(encode(Forward(PLAN))) == Forward(PLAN)
    for spec in dataclasses.fields(StepPlan):
        assert getattr(PLAN, spec.name), f"{spec.name} is empty: this test would not miss it"
    defaults = SamplingParams(1)
    for name in SamplingParams.__struct_fields__:
        assert getattr(SAMPLING, name) != getattr(defaults, name), name


def test_token_masks_are_read_in_shared_memory() -> None:
    """Their call has their number only."""
    bits = np.array([[1, -1, 2**31 - 1], [0, 5, -(2**31)]], dtype=np.int32)
    memory = MaskMemory.create(4, 96)
    step = memory.begin()
    memory.of(step)[:2] = bits
    frame = encode(Sample(Masks.of(TokenMasks((0, 3), memory.of(step)[:2], step))))
    assert len(frame) < 16
    sent = decode(frame)
    assert isinstance(sent, Sample) and sent.masks is not None
    other = MaskMemory(memory.descriptor, 4, 96)
    masks = sent.masks.read(other)
    assert (masks.rows, masks.step) == ((0, 3), step)
    np.testing.assert_array_equal(masks.bits, bits)
    sent.masks.check(other)
    assert decode(encode(Sample())) == Sample()


def test_overwritten_token_masks_are_refused() -> None:
    memory = MaskMemory.create(1, 32)
    masks = Masks((0,), memory.begin())
    for value in range(1, STEPS):
        memory.of(memory.begin())[:] = value
    assert masks.read(memory).bits.tolist() == [[0]]
    memory.begin()
    for refuses in (masks.read, masks.check):
        with pytest.raises(CallError, match="step 1 were overwritten"):
            refuses(memory)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff not msgpack",
        msgspec.msgpack.encode(["Generate", "short"]),
        msgspec.msgpack.encode(["Forward", [1, 2]]),
        msgspec.msgpack.encode(["Sample", [["a"], 1]]),
        encode(Forward(PLAN))[:-1],
    ],
)
def test_other_bytes_are_no_call(frame: bytes) -> None:
    with pytest.raises(CallError):
        decode(frame)


@pytest.mark.parametrize("count", [0, 3])
def test_masks_of_a_wrong_size_are_refused(count: int) -> None:
    memory = MaskMemory.create(2, 32)
    with pytest.raises(CallError, match=f"{count} token bitmasks, not 1 to 2"):
        Masks(tuple(range(count)), memory.begin()).read(memory)


def test_a_call_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_CALL", 50)
    encode(Sample())
    with pytest.raises(CallError, match=r"^Forward has \d+ bytes, more than 50$"):
        encode(Forward(PLAN))
