"""No step launches a kernel that the warm-up compile missed: a compilation under load stops all requests for a second.
The file is also a script, because Triton runs its interpreter in the process of the tests."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from mla_router.worker.engine.profile_run import profile_plans
from mla_router.worker.engine.runners.sizes import GraphSizes, decode_sizes
from mla_router.worker.engine.warmup_compile import launch_steps, warmup_sizes
from mla_router.worker.generation import SamplingParams
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from support.compiler_process import compiling_environment
from support.processes import ROOT

BUDGET, PAGE_SIZE = 8192, 16


class Case(NamedTuple):
    shape: str
    layers: int  # V3 begins with three dense layers
    slots: int = 256
    context: int = 32768
    largest_graph: int = 256  # decode rows; 0: no graphs
    max_keys: int = 1 << 17
    kv_cache_dtype: torch.dtype | None = None
    window: int | None = None  # of layers with pages of their own

    @property
    def capacity(self) -> Capacity:
        return Capacity(1024, PAGE_SIZE, self.slots, self.context, window=self.window)


CASES = {
    "v2-lite": Case("deepseek-v2-lite", 3),
    "v3": Case("deepseek-v3-7-layers", 5, max_keys=1 << 14),
    "llama": Case("llama-3-8b", 3, context=8192),
    "small-graphs": Case("deepseek-v2-lite", 3, slots=1024, context=163840, largest_graph=128),
    "without-graphs": Case("deepseek-v2-lite", 3, context=4096, largest_graph=0),
    "fp8-latents": Case("deepseek-v2-lite", 3, kv_cache_dtype=torch.float8_e4m3fn),
    "gemma": Case("gemma-2-9b", 4, context=8192, window=4096),
    "fp8-keys": Case("llama-3-8b", 3, context=8192, kv_cache_dtype=torch.float8_e5m2),
    "few-slots": Case("deepseek-v2-lite", 3, slots=24),
}
USUAL = ("v3", "fp8-keys")
SAMPLING = [
    SamplingParams(2),
    SamplingParams(2, temperature=0.7),
    SamplingParams(2, temperature=0.7, top_p=0.9),
    SamplingParams(2, temperature=1.0, top_k=5, logprobs=True, top_logprobs=3),
    SamplingParams(2, frequency_penalty=0.5, logit_bias=((1, 2.0),)),
]


@pytest.mark.parametrize(
    ("steps", "cases"),
    [(50, USUAL), pytest.param(150, tuple(CASES), marks=pytest.mark.slow)],
    ids=["usual", "all"],
)
def test_random_steps_launch_nothing_new(
    steps: int, cases: tuple[str, ...], tmp_path: Path
) -> None:
    environment = compiling_environment() | {"TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, __file__, str(steps), *cases], env=environment, check=True)


def draw_plan(draw: random.Random, capacity: Capacity) -> StepPlan:
    slots = draw.sample(range(capacity.num_slots), capacity.num_slots)
    decodes = draw.choice([0, 1, 2, 5, 7, 20, 100, 127, 129, 200, 250, 256, 300, 513, 768, 1000])
    decoding = [slots.pop() for _ in range(min(decodes, capacity.num_slots))]
    left = draw.choice([0, 20, 70, 100, 333, 1000, 2047, 5000, BUDGET])
    chunks, admitted = [], []
    while slots and (left or not decoding):
        length = draw.choice([1, 7, 17, 64, 65, 250, 256, 1024, 3000, BUDGET])
        length = min(left or 1, length, capacity.context_length)
        most = capacity.context_length - length
        start = min(draw.choice([0, 0, 16, 48, 2048, most]), most)
        chunks.append(PrefillChunk(slots.pop(), start, (0,) * length, draw.random() < 0.9))
        admitted.append(Admitted(chunks[-1].slot, draw.choice(SAMPLING), (0,)))
        left = max(0, left - length)
        if draw.random() < 0.2 or not (left or decoding):
            break
    lengths = tuple(draw.randrange(1, 3000) for _ in decoding)
    writes = tuple((chunk.slot, 0, 1) for chunk in chunks)
    return StepPlan(tuple(decoding), lengths, tuple(chunks), writes, tuple(admitted))


def check(case: Case, steps: int) -> None:
    from support.meta_engine import Launches, meta_engines, pretend

    pretend()
    shape = ROOT / "bench" / "shapes" / case.shape
    engines = meta_engines(shape, case.layers, case.capacity, case.kv_cache_dtype)
    warmed, launched = Launches(), Launches()
    decode = decode_sizes(case.largest_graph) if case.largest_graph else ()
    plans = profile_plans(case.capacity, BUDGET, case.max_keys)
    engine = next(engines)
    assert engine.attention.max_keys == case.max_keys or case.shape.startswith(("llama", "gemma"))
    with warmed:
        launch_steps(engine, plans, warmup_sizes(plans, GraphSizes(decode)), nullcontext)
    assert len(warmed.kernels) > 20
    engine, draw = next(engines), random.Random(0)
    with torch.inference_mode(), launched:
        for _ in range(steps):
            engine.sample(engine.forward(draw_plan(draw, case.capacity)))
    assert len(launched.kernels) > 20
    new = [
        (source.fn.__name__, source.signature, source.attrs, source.constants)
        for key, source in launched.kernels.items()
        if key not in warmed.kernels
    ]
    assert not new, new


def check_apart(name: str, steps: int) -> None:
    """Checks the case in a fork: kernels that another case has launched are not compiled again."""
    child = os.fork()
    if child == 0:
        check(CASES[name], steps)
        os._exit(0)  # without the end of an interpreter with torch, which takes a second
    _, status = os.waitpid(child, 0)
    assert status == 0, name


if __name__ == "__main__":
    for name in sys.argv[2:]:
        check_apart(name, int(sys.argv[1]))
