"""Chunks as decode rows: the rows, and the same results as chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.inputs import InputPacker
from mla_router.worker.engine.runners.choose import RunnerKind, choose_runner
from mla_router.worker.engine.runners.decode_rows import decode_rows
from mla_router.worker.engine.slots import SlotState
from mla_router.worker.generation import SamplingParams
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from support.attention import torch_attention
from support.cached_rows import cached_rows, clear, put_back
from support.checked_engine import CheckedEngine
from support.examples import examples
from support.fake_graphs import fake_decode_graphs
from support.random_requests import random_script
from support.scripted_scheduler import run
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

CPU = torch.device("cpu")
IDLE = 6
CAPACITY = Capacity(num_pages=60, page_size=4, num_slots=IDLE, context_length=40)


def chunk(slot: int, start: int, length: int, is_last: bool = True) -> PrefillChunk:
    return PrefillChunk(slot, start, tuple(range(100, 100 + length)), is_last)


def step(*chunks: PrefillChunk, decodes: int = 0) -> StepPlan:
    slots = tuple(range(decodes))
    return StepPlan(slots, tuple(5 + slot for slot in slots), chunks, (), ())


def test_rows_are_decodes_then_chunks_then_padding() -> None:
    plan = StepPlan(
        (3, 1), (10, 5), (chunk(0, 4, 3), chunk(2, 0, 2, is_last=False), chunk(5, 8, 1)), (), ()
    )
    rows = decode_rows(plan, 10, IDLE)
    assert rows.slots == [3, 1, 0, 0, 0, 2, 2, 5, IDLE, IDLE]
    assert rows.lengths == [10, 5, 5, 6, 7, 1, 2, 9, 1, 1]
    assert rows.kinds == plan.row_kinds(10) == bytes([0] * 2 + [1] * 6 + [2] * 2)
    assert rows.tokens == [0, 0, 100, 101, 102, 100, 101, 100, 0, 0]
    assert rows.sampled == [0, 1, 4, 7]
    assert not rows.first_are_sampled
    with pytest.raises(AssertionError, match="8 rows for 7"):
        decode_rows(plan, 7, IDLE)


@pytest.mark.parametrize(
    "chunks", [(), (chunk(5, 3, 1),), (chunk(5, 3, 4, is_last=False),)], ids=["none", "one", "open"]
)
@pytest.mark.parametrize("decodes", [0, 3])
def test_the_first_rows_sample(chunks: tuple[PrefillChunk, ...], decodes: int) -> None:
    plan = step(*chunks, decodes=decodes)
    rows = decode_rows(plan, 8, IDLE)
    assert rows.first_are_sampled
    assert [rows.slots[row] for row in rows.sampled] == list(plan.sampled_slots)


def test_packed() -> None:
    plan = StepPlan((3, 1), (10, 5), (chunk(0, 4, 3),), ((0, 1, 11), (3, 2, 13)), ())
    rows = decode_rows(plan, 7, IDLE)
    inputs = InputPacker(CPU, SlotState(CAPACITY, CPU)).pack_decode_rows(plan, rows)
    assert inputs.rows.tolist() == [rows.slots, rows.lengths, rows.tokens]
    assert inputs.kinds.tolist() == list(rows.kinds)
    assert inputs.rows.is_contiguous()
    assert inputs.sampled.tolist() == [0, 1, 4]
    assert inputs.sampled_slots.tolist() == list(plan.sampled_slots)
    # The page table of seven slots with ten pages, then the lengths
    assert inputs.entries.tolist() == [1, 32, 70]
    assert inputs.values.tolist() == [11, 13, 7]


@pytest.fixture(scope="module", params=["v3", "llama_gqa"])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """Two engines of one model: without graphs, and with graphs of each size up to 16 and of 24."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_tiny_model(folder, **CONFIGS[request.param])
    model = load_model(folder, device=CPU, dtype=torch.float32)
    eager, with_graphs = (
        Engine(
            model,
            CAPACITY,
            device=CPU,
            dtype=torch.float32,
            attention=torch_attention(model.config),
        )
        for _ in range(2)
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_decode_graphs(with_graphs, [*range(1, 17), 24], monkeypatch)
    yield eager, with_graphs


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 20),  # tokens in the cache
        st.integers(0, 6),  # tokens in the chunk; 0: the request decodes
        st.booleans(),  # the chunk is the last one
    ),
    min_size=1,
    max_size=4,
)


@examples(30)
@given(requests=REQUESTS, seed=st.integers(0, 1000))
def test_decode_rows_compute_the_same_as_chunks(
    engines: tuple[Engine, Engine], requests: list[tuple[int, int, bool]], seed: int
) -> None:
    """Chunks use prefill attention, over expanded keys if the model has latents."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB_SIZE, (count,), generator=draw).tolist())

    order: list[int] = torch.randperm(IDLE, generator=draw).tolist()
    slots = order[: len(requests)]
    pages = tuple((slot, index, 1 + 10 * slot + index) for slot in slots for index in range(10))
    # A decoding request has a prompt
    states = [(held or int(not new), new, last) for held, new, last in requests]
    of_slots = list(zip(slots, states, strict=True))
    prompts = [PrefillChunk(slot, 0, tokens(held), True) for slot, (held, *_) in of_slots if held]
    decoding = [(slot, held + 1) for slot, (held, new, _) in of_slots if not new]
    plan = StepPlan(
        tuple(slot for slot, _ in decoding),
        tuple(length for _, length in decoding),
        tuple(
            PrefillChunk(slot, held, tokens(new), last)
            for slot, (held, new, last) in of_slots
            if new
        ),
        pages,
        tuple(Admitted(slot, SamplingParams(9), tokens(3)) for slot in slots),
    )
    last_tokens = torch.tensor(tokens(IDLE))
    eager, with_graphs = engines
    clear(eager)
    if prompts:
        eager.forward(StepPlan((), (), tuple(prompts), pages, ()))
    before = cached_rows(eager)
    seen = []
    for engine in engines:
        put_back(engine, before)
        engine.slots.last_token[:IDLE] = last_tokens
        for slot, length in decoding:
            engine.slots.lengths[slot] = length
        launched = engine.forward(plan)
        # Padding rows write to page 0; sampling overwrites the logits
        computed = launched.logits.clone(), cached_rows(engine)[:, 1:]
        sampled = engine.sample(launched).wait().tokens
        state = (
            engine.slots.last_token[:IDLE].tolist(),
            engine.slots.lengths[list(plan.sampled_slots)].tolist(),
        )
        seen.append((computed, launched.slots.tolist(), sampled, state))
    kind = choose_runner(plan, with_graphs.runners.sizes).kind
    assert (kind is RunnerKind.DECODE_GRAPH) == (plan.num_tokens <= 24)
    (want, *wanted), (got, *others) = seen
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert others == wanted


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_requests_get_the_same_tokens(
    engines: tuple[Engine, Engine], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End to end, with chunks of at most 7 tokens, a prefix cache and logprobs of prompt tokens."""
    model = engines[0].model
    capacity = Capacity(num_pages=400, page_size=4, num_slots=12, context_length=160)
    script = random_script(3, 40, aborts=False)
    runs, replays = [], []
    for sizes in ([], [1, 2, 4, 8, 12, 16, 24]):
        engine = CheckedEngine(
            model,
            capacity,
            device=CPU,
            dtype=torch.float32,
            attention=torch_attention(model.config),
        )
        graphs = fake_decode_graphs(engine, sizes, monkeypatch) if sizes else []
        runs.append(
            run(
                {at: list(messages) for at, messages in script.items()},
                engine=engine,
                capacity=capacity,
                vocab_size=VOCAB_SIZE,
                overlap=overlap,
                chunk_size=7,
            )
        )
        replays.append(sum(graph.replays for graph in graphs))
    assert replays[0] == 0 and replays[1] > 100
    for n in range(40):
        assert runs[1].channel.tokens(f"r{n}") == runs[0].channel.tokens(f"r{n}")
