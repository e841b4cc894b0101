"""Decode steps as CUDA graphs give what they give kernel by kernel."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.config import WorkerConfig
from mla_router.worker.core import Admitted, Capacity, PrefillChunk, SamplingParams, StepPlan
from mla_router.worker.engine.attention.choose import choose_attention
from mla_router.worker.engine.engine import Engine, GraphSizes
from mla_router.worker.engine.loader import choose_config
from mla_router.worker.engine.working_memory import measure_working_memory
from mla_router.worker.model.loader import load_model
from support.cuda import forbid_waiting
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
}


@pytest.fixture(scope="module", params=list(WIDTHS))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    name, _, expanded = request.param.partition(" ")
    folder = tmp_path_factory.mktemp(name)
    write_tiny_model(folder, **CONFIGS[name] | WIDTHS[request.param])
    config = choose_config(WorkerConfig(model_path=str(folder), disable_mla=bool(expanded)))
    model = load_model(folder, device=CUDA, dtype=torch.bfloat16, config=config)
    attention = choose_attention("auto", model.config, CUDA, torch.bfloat16)
    assert attention.recordable
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
    before = engine.cache.clone()
    want = engine.forward(plan).logits.clone()
    written = engine.cache.clone()

    engine.cache.copy_(before)
    engine.record_graphs(GraphSizes([2, 4, 8], []))
    try:
        launched = engine.forward(plan)
        torch.testing.assert_close(launched.logits, want, rtol=2e-2, atol=2e-2)
        assert launched.slots.tolist() == list(slots)
        assert launched.positions.tolist() == [length + 1 for length in lengths]
        # Page 0 takes what idle rows write.
        torch.testing.assert_close(engine.cache[:, 1:], written[:, 1:], rtol=2e-2, atol=2e-2)

        # Fewer rows afterwards: those that left are not written to.
        few = StepPlan((3,), (lengths[3] + 2,), (), (), ())
        kept = engine.cache[:, 1:].clone()
        with forbid_waiting():
            engine.sample(engine.forward(few))
        changed = (engine.cache[:, 1:] != kept).any(-1).any(0).nonzero().tolist()
        assert changed == [[10 * 3 + 101 // 16, 101 % 16]]
    finally:
        engine.record_graphs(GraphSizes([], []))


def test_the_same_tokens(engine: Engine) -> None:
    """Greedy, step by step, each from the token before; of sizes that need no padding, since matrix products
    of another size may round differently."""
    lengths = [5, 16, 33]
    told = []
    for sizes in (GraphSizes([], []), GraphSizes([3], [54])):
        engine.record_graphs(sizes)
        try:
            prefill(engine, lengths)
            steps = [
                StepPlan((0, 1, 2), tuple(length + 1 + step for length in lengths), (), (), ())
                for step in range(40)
            ]
            told.append([engine.sample(engine.forward(plan)).wait().tokens for plan in steps])
        finally:
            engine.record_graphs(GraphSizes([], []))
    assert told[0] == told[1]


def test_prompts_in_pieces(engine: Engine) -> None:
    """A mixed step, of a size that is padded and of one that is not."""
    lengths = [5, 16, 33]
    prefill(engine, lengths)
    before = engine.cache.clone()
    for new in (13, 29):  # 16 and 32 rows
        chunk = PrefillChunk(4, 0, tuple(range(new)), is_last=True)
        plan = StepPlan(
            (0, 1, 2),
            tuple(length + 1 for length in lengths),
            (chunk,),
            tuple((4, page, 50 + page) for page in range(10)),
            (Admitted(4, SamplingParams(50), chunk.tokens),),
        )
        engine.cache.copy_(before)
        want = engine.forward(plan).logits.clone()
        written = engine.cache.clone()
        engine.cache.copy_(before)
        engine.record_graphs(GraphSizes([], [16, 32]))
        try:
            engine.forward(plan)  # whatever it leaves behind must not matter to the next
            engine.cache.copy_(before)
            with forbid_waiting():
                launched = engine.forward(plan)
            torch.testing.assert_close(launched.logits, want, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(engine.cache[:, 1:], written[:, 1:], rtol=2e-2, atol=2e-2)
        finally:
            engine.record_graphs(GraphSizes([], []))


def test_working_memory_is_what_a_step_takes(engine: Engine) -> None:
    needed = measure_working_memory(
        engine.model,
        CAPACITY,
        prefill_tokens=128,
        graph_sizes=GraphSizes([1, 8], [16, 32]),
        device=CUDA,
        dtype=torch.bfloat16,
        attention=engine.attention,
    )
    vocabulary = engine.model.config.vocab_size
    assert needed.step > CAPACITY.num_slots * vocabulary * 4  # the logits alone
    assert needed.graphs >= 0
