"""No step, whatever is in it, launches a kernel that the rehearsal had not: one that is compiled under load stops
everybody for a second. The file is also a script, since Triton interprets in the tests' process."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from mla_router.worker.core import Admitted, Capacity, PrefillChunk, SamplingParams, StepPlan
from mla_router.worker.engine.engine import GraphSizes
from mla_router.worker.engine.graphs import graph_sizes
from mla_router.worker.engine.rehearsal import rehearsed_sizes
from mla_router.worker.engine.working_memory import dearest_plans
from support.processes import ROOT
from support.sm90 import compiling_environment

LAYERS, STEPS, BUDGET = 4, 150, 8192  # V3 begins with three dense ones
CAPACITY = Capacity(num_pages=1024, page_size=16, num_slots=256, context_length=32768)
SAMPLING = [
    SamplingParams(2),
    SamplingParams(2, temperature=0.7),
    SamplingParams(2, temperature=0.7, top_p=0.9),
    SamplingParams(2, temperature=1.0, top_k=5, logprobs=True, top_logprobs=3),
    SamplingParams(2, frequency_penalty=0.5, logit_bias=((1, 2.0),)),
]


@pytest.mark.parametrize("shape", ["deepseek-v2-lite", "deepseek-v3-7-layers", "llama-3-8b"])
def test_random_steps_launch_nothing_new(shape: str, tmp_path: Path) -> None:
    environment = compiling_environment() | {"TRITON_CACHE_DIR": str(tmp_path)}
    folder = ROOT / "bench" / "shapes" / shape
    subprocess.run([sys.executable, __file__, str(folder)], env=environment, check=True)


def draw_plan(draw: random.Random) -> StepPlan:
    slots = draw.sample(range(CAPACITY.num_slots), CAPACITY.num_slots)
    decodes = [
        slots.pop() for _ in range(draw.choice([0, 1, 2, 5, 7, 20, 100, 127, 129, 200, 250]))
    ]
    left = draw.choice([0, 20, 70, 100, 333, 1000, 2047, 5000, BUDGET])
    chunks, admitted = [], []
    while slots and (left or not decodes):
        length = min(left or 1, draw.choice([1, 7, 17, 64, 65, 250, 256, 1024, 3000, BUDGET]))
        start = draw.choice([0, 0, 16, 48, 2048])
        chunks.append(PrefillChunk(slots.pop(), start, (0,) * length, draw.random() < 0.9))
        admitted.append(Admitted(chunks[-1].slot, draw.choice(SAMPLING), (0,)))
        left = max(0, left - length)
        if draw.random() < 0.2 or not (left or decodes):
            break
    lengths = tuple(draw.randrange(1, 3000) for _ in decodes)
    writes = tuple((chunk.slot, 0, 1) for chunk in chunks)
    return StepPlan(tuple(decodes), lengths, tuple(chunks), writes, tuple(admitted))


def check(folder: Path) -> None:
    from support.meta_engine import Launches, meta_engines, pretend

    pretend()
    engines = meta_engines(folder, LAYERS, CAPACITY)
    rehearsed, launched = Launches(), Launches()
    sizes = GraphSizes(graph_sizes(CAPACITY.num_slots), ())
    plans = dearest_plans(CAPACITY, BUDGET)
    with rehearsed:
        next(engines).rehearse(plans, rehearsed_sizes(plans, sizes), nullcontext)
    assert len(rehearsed.kernels) > 20
    engine, draw = next(engines), random.Random(0)
    with torch.inference_mode(), launched:
        for _ in range(STEPS):
            engine.sample(engine.forward(draw_plan(draw)))
    assert len(launched.kernels) > 20
    new = [
        (source.fn.__name__, source.signature, source.attrs, source.constants)
        for key, source in launched.kernels.items()
        if key not in rehearsed.kernels
    ]
    assert not new, new


if __name__ == "__main__":
    check(Path(sys.argv[1]))
