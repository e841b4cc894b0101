"""The engine on a GPU: the CPU's tokens, and no hidden wait for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_router.worker.engine.engine import Engine
from mla_router.worker.generation import SamplingParams
from mla_router.worker.messages import ToScheduler
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from support.attention import torch_attention
from support.cuda import forbid_waiting
from support.random_requests import random_script
from support.scripted_scheduler import Run, run
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model
from support.token_masks import token_masks

pytestmark = pytest.mark.gpu

CAPACITY = Capacity(num_pages=400, page_size=4, num_slots=12, context_length=160)


@pytest.fixture(scope="module", params=["v2_lite", "v3", "llama_gqa"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    write_tiny_model(path, **CONFIGS[request.param])
    return path


def engine(folder: Path, device: str, dtype: torch.dtype) -> Engine:
    at = torch.device(device)
    model = load_model(folder, device=at, dtype=dtype)
    return Engine(model, CAPACITY, device=at, dtype=dtype, attention=torch_attention(model.config))


def serve(on: Engine, script: dict[int, list[ToScheduler]], *, overlap: bool) -> Run:
    return run(
        script,
        overlap=overlap,
        chunk_size=32,
        capacity=CAPACITY,
        engine=on,
        vocab_size=VOCAB_SIZE,
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_the_gpu_gives_the_cpu_s_tokens(folder: Path, overlap: bool) -> None:
    script = random_script(3, 60, aborts=False)
    want = serve(engine(folder, "cpu", torch.float32), script, overlap=overlap)
    got = serve(engine(folder, "cuda", torch.float32), script, overlap=overlap)
    for n in range(60):
        assert got.channel.tokens(f"r{n}") == want.channel.tokens(f"r{n}")


def test_launching_never_waits_for_the_device(folder: Path) -> None:
    on = engine(folder, "cuda", torch.bfloat16)
    sampling = SamplingParams(
        max_tokens=50,
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        logit_bias=((3, 1.0),),
        min_tokens=9,
        stop_token_ids=frozenset({5}),
        logprobs=True,
        top_logprobs=4,
        prompt_logprobs_from=0,
    )
    prefill = StepPlan(
        decode_slots=(),
        decode_bounds=(),
        chunks=(
            PrefillChunk(0, 0, tuple(range(7)), True),
            PrefillChunk(1, 0, tuple(range(5)), True, logprob_start=0, logprob_tokens=(1, 2, 3, 4)),
        ),
        page_writes=((0, 0, 1), (0, 1, 2), (1, 0, 3), (1, 1, 4)),
        admitted=(
            Admitted(0, SamplingParams(50), range(7)),
            Admitted(1, sampling, range(5)),
        ),
    )
    mixed = StepPlan(
        decode_slots=(0, 1),
        decode_bounds=(8, 6),
        chunks=(PrefillChunk(2, 0, tuple(range(9)), True),),
        page_writes=((2, 0, 5), (2, 1, 6), (2, 2, 7)),
        admitted=(Admitted(2, SamplingParams(50), range(9)),),
    )
    on.sample(on.forward(prefill)).wait()  # lazy initialisation may wait, once
    on.sample(on.forward(mixed)).wait()
    masks = token_masks({1: range(100, VOCAB_SIZE)}, VOCAB_SIZE)
    with forbid_waiting():
        pending = [on.sample(on.forward(plan), masks) for plan in (prefill, mixed)]
    results = [step.wait() for step in pending]
    assert [len(result.tokens) for result in results] == [2, 3]
    assert all(0 <= token < VOCAB_SIZE for result in results for (token,) in result.tokens)
