"""Steps as CUDA graphs, whole or piecewise, give the same results as kernel by kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.attention.choose import choose_attention
from mla_router.worker.engine.choose import choose_config
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners.choose import RunnerKind
from mla_router.worker.engine.runners.decode_rows import decode_rows
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.engine.working_memory import measure_working_memory
from mla_router.worker.generation import SamplingParams
from mla_router.worker.model.config.llama import LlamaConfig
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from support.cached_rows import cached_rows, clear, put_back
from support.cuda import assert_rows_close, forbid_waiting
from support.tiny_model import CONFIGS, write_tiny_model

pytestmark = pytest.mark.gpu

CAPACITY = Capacity(num_pages=200, page_size=16, num_slots=9, context_length=160)
CUDA = torch.device("cuda")


WIDTHS = {
    "v2_lite": {"qk_rope_head_dim": 16},
    "v2_lite expanded": {},
    "v3": {"qk_rope_head_dim": 16},
    "llama_gqa": {"head_dim": 64},
    "llama_mqa": {},
    "gemma2": {"head_dim": 64},
}


@pytest.fixture(scope="module", params=list(WIDTHS))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    name, _, expanded = request.param.partition(" ")
    folder = tmp_path_factory.mktemp(name)
    write_tiny_model(folder, **CONFIGS[name] | WIDTHS[request.param])
    config = choose_config(WorkerConfig(model_path=str(folder), disable_mla=bool(expanded)))
    model = load_model(folder, device=CUDA, dtype=torch.bfloat16, config=config)
    attention = choose_attention("auto", model.config, CUDA, torch.bfloat16)
    assert attention.supports_decode_graph
    return Engine(model, CAPACITY, device=CUDA, dtype=torch.bfloat16, attention=attention)


def prefill(engine: Engine, lengths: list[int]) -> None:
    chunks = tuple(
        PrefillChunk(slot, 0, tuple(range(slot, slot + length)), is_last=True)
        for slot, length in enumerate(lengths)
    )
    plan = StepPlan(
        (),
        (),
        chunks,
        tuple(
            (slot, page, 1 + 10 * slot + page) for slot in range(len(lengths)) for page in range(10)
        ),
        tuple(Admitted(c.slot, SamplingParams(50), c.tokens) for c in chunks),
    )
    engine.sample(engine.forward(plan)).wait()


def test_the_same_logits(engine: Engine) -> None:
    lengths = [5, 16, 33, 100, 47]
    prefill(engine, lengths)
    slots = tuple(range(len(lengths)))
    plan = StepPlan(slots, tuple(length + 1 for length in lengths), (), (), ())
    before = cached_rows(engine)
    want = engine.forward(plan).logits.clone()
    written = cached_rows(engine)

    put_back(engine, before)
    # Without 8: attention of 8 requests has tiles with another order of additions than that of 5
    engine.capture_graphs(GraphSizes(decode=[2, 4, 7]))
    try:
        launched = engine.forward(plan)
        torch.testing.assert_close(launched.logits, want, rtol=2e-2, atol=2e-2)
        assert launched.slots.tolist() == list(slots)
        # Idle rows write to page 0.
        torch.testing.assert_close(cached_rows(engine)[:, 1:], written[:, 1:], rtol=2e-2, atol=2e-2)

        engine.sample(launched)
        assert engine.slots.lengths[: len(lengths)].tolist() == [length + 2 for length in lengths]

        # Fewer rows afterwards: ended requests are not written to.
        few = StepPlan((3,), (lengths[3] + 2,), (), (), ())
        kept = cached_rows(engine)[:, 1:]
        with forbid_waiting():
            engine.sample(engine.forward(few))
        changed = (cached_rows(engine)[:, 1:] != kept).any(-1).any(0).nonzero().tolist()
        assert changed == [[10 * 3 + 101 // 16, 101 % 16]]
    finally:
        engine.capture_graphs(GraphSizes())


def test_the_same_tokens(engine: Engine) -> None:
    """Greedy decode steps, of sizes without padding, because matrix products of another size may round
    differently."""
    lengths = [5, 16, 33]
    told = []
    for sizes in (GraphSizes(), GraphSizes([3], [54], [54])):
        engine.capture_graphs(sizes)
        try:
            prefill(engine, lengths)
            steps = [
                StepPlan((0, 1, 2), tuple(length + 1 + step for length in lengths), (), (), ())
                for step in range(40)
            ]
            told.append([engine.sample(engine.forward(plan)).wait().tokens for plan in steps])
        finally:
            engine.capture_graphs(GraphSizes())
    assert told[0] == told[1]


def test_prompts_in_pieces(engine: Engine) -> None:
    """A mixed step, with and without padding."""
    lengths = [5, 16, 33]
    prefill(engine, lengths)
    before = cached_rows(engine)
    for new in (13, 29):  # 16 and 32 rows
        chunk = PrefillChunk(4, 0, tuple(range(new)), is_last=True)
        plan = StepPlan(
            (0, 1, 2),
            tuple(length + 1 for length in lengths),
            (chunk,),
            tuple((4, page, 50 + page) for page in range(10)),
            (Admitted(4, SamplingParams(50), chunk.tokens),),
        )
        put_back(engine, before)
        want = engine.forward(plan).logits.clone()
        written = cached_rows(engine)
        put_back(engine, before)
        engine.capture_graphs(GraphSizes(piecewise=[16, 32]))
        try:
            engine.forward(plan)  # its remains must not affect the next step
            put_back(engine, before)
            with forbid_waiting():
                launched = engine.forward(plan)
            torch.testing.assert_close(launched.logits, want, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(
                cached_rows(engine)[:, 1:], written[:, 1:], rtol=2e-2, atol=2e-2
            )
        finally:
            engine.capture_graphs(GraphSizes())


NONE, PIECES = GraphSizes(), GraphSizes(piecewise=[16, 32])
PROMPTS = GraphSizes(piecewise=[16, 32], prefill=[16, 32])
PREFILL, PIECEWISE, DECODE = RunnerKind.PREFILL_GRAPH, RunnerKind.PIECEWISE, RunnerKind.DECODE_GRAPH


@pytest.fixture
def replayed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunnerKind, int]]:
    """Returns the kinds and rows of the replayed graphs."""
    seen: list[tuple[RunnerKind, int]] = []
    runners = {
        DECODE: engine.runners.decode_graph,
        PREFILL: engine.runners.prefill_graph,
        PIECEWISE: engine.runners.piecewise,
    }

    def watch(kind: RunnerKind) -> None:
        runner: Any = runners[kind]
        pack = runner.pack

        def watched(plan: StepPlan, rows: int) -> Any:
            seen.append((kind, rows))
            return pack(plan, rows)

        monkeypatch.setattr(runner, "pack", watched)

    for kind in runners:
        watch(kind)
    return seen


def prompt(slot: int, start: int, length: int) -> tuple[PrefillChunk, Admitted]:
    tokens = tuple(range(length, 2 * length))
    chunk = PrefillChunk(slot, start, tokens, is_last=True)
    return chunk, Admitted(slot, SamplingParams(50), tokens)


def run_all(
    engine: Engine, sizes: GraphSizes, plans: list[StepPlan]
) -> list[tuple[Tensor, Tensor]]:
    """Returns the logits and the cache after each of `plans`, from an empty cache. Each step is launched before the
    previous one is waited for. Padding rows write to page 0."""
    results, before = [], None
    engine.capture_graphs(sizes)
    clear(engine)
    try:
        for plan in plans:
            launched = engine.forward(plan)
            results.append((launched.logits.clone(), cached_rows(engine)[:, 1:]))
            engine.slots.check(plan)
            pending = engine.sample(launched)
            engine.slots.last_token.fill_(7)  # near ties must not diverge
            if before is not None:
                before.wait()
            before = pending
        assert before is not None
        before.wait()
    finally:
        engine.capture_graphs(NONE)
    return results


@pytest.mark.parametrize("alike", [True, False], ids=["in pieces", "kernel by kernel"])
def test_prompts_alone(
    engine: Engine,
    alike: bool,
    replayed: list[tuple[RunnerKind, int]],
) -> None:
    """Against pieces, which have the same rows, padding included, and against kernels without padding: other
    numbers of rows round differently, by which other experts may be chosen; and a single row has kernels
    of its own."""
    lengths = [31, 5, 32, 1, 16, 15, 33]
    if not alike:
        dense = isinstance(engine.model.config, LlamaConfig)
        lengths = [31, 5, 32, 16, 15, 33] if dense else [32, 16, 33]
    taken = [16 if length <= 16 else 32 for length in lengths if length <= 32]
    pages = tuple((4, page, 50 + page) for page in range(10))
    plans = []
    for length in lengths:
        chunk, admitted = prompt(4, 0, length)
        plans.append(StepPlan((), (), (chunk,), pages, (admitted,)))

    want = run_all(engine, PIECES if alike else NONE, plans)
    assert replayed == [(PIECEWISE, size) for size in taken if alike]
    replayed.clear()
    got = run_all(engine, PROMPTS, plans)
    assert replayed == [(PREFILL, size) for size in taken]
    for got_one, want_one in zip(got, want, strict=True):
        torch.testing.assert_close(got_one, want_one, rtol=2e-2, atol=2e-2)


def test_a_prompt_alone_waits_for_nothing(
    engine: Engine, replayed: list[tuple[RunnerKind, int]]
) -> None:
    chunk, admitted = prompt(4, 0, 20)
    pages = tuple((4, page, 50 + page) for page in range(10))
    plan = StepPlan((), (), (chunk,), pages, (admitted,))
    engine.capture_graphs(PROMPTS)
    try:
        engine.sample(engine.forward(plan)).wait()
        with forbid_waiting():
            engine.sample(engine.forward(plan))
        assert replayed == [(PREFILL, 32)] * 2
    finally:
        engine.capture_graphs(NONE)


def test_prompts_not_alone_go_in_pieces(
    engine: Engine, replayed: list[tuple[RunnerKind, int]]
) -> None:
    """A prompt after a prefix, beside another prompt, and beside a decode row; 16 rows each, without padding."""
    pages = tuple((slot, page, 1 + 10 * slot + page) for slot in range(6) for page in range(10))
    (first, admitted), (after, _) = prompt(4, 0, 16), prompt(4, 16, 16)
    (left, of_left), (right, of_right) = prompt(1, 0, 10), prompt(2, 0, 6)
    beside, of_beside = prompt(3, 0, 15)
    plans = [
        StepPlan((), (), (first,), pages, (admitted,)),
        StepPlan((), (), (after,), (), ()),
        StepPlan((), (), (left, right), (), (of_left, of_right)),
        StepPlan((1,), (11,), (beside,), (), (of_beside,)),
    ]
    want = run_all(engine, NONE, plans)
    assert not replayed
    got = run_all(engine, PROMPTS, plans)
    assert replayed == [(PREFILL, 16)] + [(PIECEWISE, 16)] * 3
    for got_one, want_one in zip(got, want, strict=True):
        torch.testing.assert_close(got_one, want_one, rtol=2e-2, atol=2e-2)


HELD = [5, 16, 33, 100]  # tokens of the requests in the first slots


def jump(slot: int, length: int, is_last: bool = True) -> PrefillChunk:
    return PrefillChunk(slot, HELD[slot], tuple(range(60, 60 + length)), is_last)


def mixed(*chunks: PrefillChunk, decodes: tuple[int, ...] = ()) -> StepPlan:
    """Chunks of requests in the cache, and new prompts from slot 4 on."""
    return StepPlan(
        decodes,
        tuple(HELD[slot] + 1 for slot in decodes),
        chunks,
        tuple((4, page, 50 + page) for page in range(10)),
        tuple(Admitted(c.slot, SamplingParams(50), c.tokens) for c in chunks if not c.start),
    )


# Each with the size of the graph that is replayed.
FEW_TOKENS = {
    "a run beside decodes": (mixed(jump(3, 3), decodes=(0, 1, 2)), 7),
    "two runs, and a decode behind them": (mixed(jump(3, 2), jump(0, 3), decodes=(1,)), 7),
    "an open chunk": (mixed(jump(3, 2, is_last=False), decodes=(2,)), 4),
    "a run alone": (mixed(jump(2, 2)), 4),
    "a new prompt": (mixed(prompt(4, 0, 3)[0], decodes=(0,)), 4),
    "a new prompt alone": (mixed(prompt(4, 0, 4)[0]), 4),
    "the last token of a prompt": (mixed(jump(3, 1), decodes=(1, 2)), 4),
}


@pytest.mark.parametrize("name", FEW_TOKENS)
def test_few_prompt_tokens_are_decode_rows(
    engine: Engine, name: str, replayed: list[tuple[RunnerKind, int]]
) -> None:
    """As the same rows, padding included, kernel by kernel; and models without experts, of which roundings
    might choose others, as with the attention of prompts."""
    plan, size = FEW_TOKENS[name]
    prefill(engine, HELD)
    entries, values = engine.slots.writes(plan)
    engine.slots.write(
        torch.tensor(entries, device=CUDA), torch.tensor(values, dtype=torch.int32, device=CUDA)
    )
    engine.slots.last_token.random_(300)
    before, tokens = cached_rows(engine), engine.slots.last_token.clone()
    lengths = engine.slots.lengths.clone()

    rows = decode_rows(plan, size, engine.slots.idle_slot)
    on_device = torch.tensor([rows.slots, rows.lengths, rows.tokens], device=CUDA)
    kinds = torch.tensor([*rows.kinds], dtype=torch.int8, device=CUDA)
    engine.forward_pass.prepare_decode(rows.slots, rows.lengths)
    output = engine.forward_pass.decode(engine.slots.look_up(on_device, kinds))
    want, hidden_states = output.logits[rows.sampled], output.hidden_states
    written = cached_rows(engine)
    put_back(engine, before)
    as_prompts = engine.forward(plan).logits.clone()
    assert not replayed

    engine.capture_graphs(GraphSizes([4, 7], [16, 32], [16, 32]))
    try:
        for _ in range(2):  # the remains of the first must not affect the second
            put_back(engine, before)
            engine.slots.last_token.copy_(tokens)
            engine.slots.lengths.copy_(lengths)
            with forbid_waiting():
                launched = engine.forward(plan)
                got, states = launched.logits.clone(), launched.hidden_states.clone()
                pending = engine.sample(launched)
        assert replayed == [(DECODE, size)] * 2
        assert launched.slots.tolist() == list(plan.sampled_slots)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(states, hidden_states, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(cached_rows(engine)[:, 1:], written[:, 1:], rtol=2e-2, atol=2e-2)
        if isinstance(engine.model.config, LlamaConfig):
            assert_rows_close(got, as_prompts.double(), most=6e-2)
        # Greedy tokens are kept for the next step; the last tokens of other slots are unchanged
        sampled = [token for (token,) in pending.wait().tokens]
        assert [row[token].item() for row, token in zip(got, sampled, strict=True)] == got.amax(
            -1
        ).tolist()
        tokens[list(plan.sampled_slots)] = torch.tensor(sampled, device=CUDA)
        assert engine.slots.last_token.tolist() == tokens.tolist()
        lengths[list(plan.sampled_slots)] += 1
        assert engine.slots.lengths.tolist() == lengths.tolist()
    finally:
        engine.capture_graphs(NONE)


def test_more_prompt_tokens_go_in_pieces(
    engine: Engine, replayed: list[tuple[RunnerKind, int]]
) -> None:
    """Steps with more rows than the largest decode graph, or with logprobs of prompt tokens."""
    prefill(engine, HELD)
    scored = PrefillChunk(4, 0, (1, 2, 3), is_last=True, logprob_tokens=(2, 3))
    engine.capture_graphs(GraphSizes([4, 7], [16, 32], [16, 32]))
    try:
        for plan in (mixed(jump(3, 7), decodes=(0,)), mixed(scored, decodes=(0,))):
            engine.sample(engine.forward(plan)).wait()
        assert replayed == [(PIECEWISE, 16)] * 2
    finally:
        engine.capture_graphs(NONE)


def test_working_memory_equals_the_memory_of_a_step(engine: Engine) -> None:
    needed = measure_working_memory(
        partial(
            Engine, engine.model, device=CUDA, dtype=torch.bfloat16, attention=engine.attention
        ),
        CAPACITY,
        prefill_tokens=128,
        graph_sizes=GraphSizes([1, 8], [16, 32], [16, 32]),
    )
    vocabulary = engine.model.config.vocab_size
    assert needed.step > CAPACITY.num_slots * vocabulary * 4  # the logits alone
    assert needed.graphs >= 0
