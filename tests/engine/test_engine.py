"""The scheduler with a real model: batching, chunks and caching do not change a request's tokens."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mla_router.worker.engine.engine import Engine
from mla_router.worker.messages import Generate, ToScheduler
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from support.attention import torch_attention
from support.checked_engine import CheckedEngine
from support.random_requests import random_script
from support.random_sampling import random_sampling
from support.scripted_scheduler import Run, generate, run
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

CPU = torch.device("cpu")
CAPACITY = Capacity(num_pages=400, page_size=4, num_slots=12, context_length=160)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, **CONFIGS["v3"])
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return load_model(folder, device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def serve(
    model: CausalLM,
    script: dict[int, list[ToScheduler]],
    capacity: Capacity = CAPACITY,
    **how,
) -> Run:
    engine = CheckedEngine(
        model, capacity, device=CPU, dtype=torch.float32, attention=torch_attention(model.config)
    )
    return run(script, engine=engine, capacity=capacity, vocab_size=VOCAB_SIZE, **how)


def logprobs(of: Run, rid: str) -> list[float]:
    """Returns all output of each request, in order."""
    values = []
    for delta in of.channel.deltas()[rid]:
        for told in (delta.prompt_logprobs, delta.logprobs):
            if told is not None:
                values += [*told.logprobs, *chain.from_iterable(told.top_logprobs)]
    return values


def test_overlap_and_normal_give_identical_tokens(model: CausalLM) -> None:
    script = random_script(0, 100, aborts=True)
    overlap = serve(model, script, overlap=True, chunk_size=32)
    normal = serve(model, script, overlap=False, chunk_size=32)
    ended = 0
    for n in range(100):
        rid = f"r{n}"
        got, want = overlap.channel.tokens(rid), normal.channel.tokens(rid)
        if "abort" in (overlap.channel.reason(rid), normal.channel.reason(rid)):
            common = min(len(got), len(want))
            assert got[:common] == want[:common]
        else:
            assert got == want
            # Matrix products of other sizes round differently.
            assert logprobs(overlap, rid) == pytest.approx(logprobs(normal, rid), abs=1e-4)
            assert overlap.channel.reason(rid) == normal.channel.reason(rid)
            ended += 1
    assert ended > 60
    for outcome in (overlap, normal):
        stats = outcome.scheduler.stats()
        assert stats.free_slots == stats.total_slots
        assert stats.free_pages + stats.cached_pages == stats.total_pages


def test_neither_cache_nor_chunks_nor_batch_nor_retraction_change_the_tokens(
    model: CausalLM,
) -> None:
    script = random_script(7, 25, aborts=False)
    reference = serve(model, script, chunk_size=4096, use_prefix_cache=False)
    others = [
        serve(model, script, chunk_size=7),
        serve(model, script, chunk_size=64, overlap=False),
        serve(model, script, Capacity(1600, 1, 3, 160), chunk_size=16),
        serve(model, script, Capacity(34, 4, 12, 120), schedule_conservativeness=0.01),
    ]
    assert others[-1].scheduler.stats().retracted > 0
    for n in range(25):
        for other in others:
            assert other.channel.tokens(f"r{n}") == reference.channel.tokens(f"r{n}")


def test_logprobs_are_sent_if_requested(model: CausalLM) -> None:
    script: dict[int, list[ToScheduler]] = {
        0: [generate("a", [5, 6, 7], 5, logprobs=True), generate("b", [5, 6, 7], 5)]
    }
    deltas = serve(model, script).channel.deltas()
    assert all(delta.logprobs and delta.logprobs.logprobs[0] <= 0 for delta in deltas["a"])
    assert all(delta.logprobs is None for delta in deltas["b"])


@pytest.mark.parametrize("chunk_size", [7, 512])
def test_prompt_logprobs_agree_with_transformers(
    model: CausalLM, reference: Any, chunk_size: int
) -> None:
    """Compares the logprobs of whole prompts and of their ends, in chunks and with cached prefixes."""
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    script: dict[int, list[ToScheduler]] = {}
    prompts, first, top = [], [], []
    for n in range(12):
        prompts.append([*shared[: 5 * n], *rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 90))])
        first.append(rng.choice([0, 1, len(prompts[n]) // 2, len(prompts[n]) - 1]))
        top.append(rng.choice([0, 1, 20]))
        request = generate(
            f"r{n}", prompts[n], 3, top_logprobs=top[n], prompt_logprobs_from=first[n]
        )
        script.setdefault(2 * n, []).append(request)
    deltas = serve(model, script, chunk_size=chunk_size).channel.deltas()
    for n, prompt in enumerate(prompts):
        got = next(d.prompt_logprobs for d in deltas[f"r{n}"] if d.prompt_logprobs)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt])).logits[0]
        want = logits.double().log_softmax(-1)
        places = range(max(1, first[n]), len(prompt))  # the first token has no logprob
        assert got.logprobs == pytest.approx(
            [want[i - 1, prompt[i]].item() for i in places], abs=1e-4
        )
        if top[n]:
            best = [want[i - 1].topk(top[n]) for i in places]
            assert len(got.top_ids) == len(got.top_logprobs) == len(best)
            for ids, values, likeliest in zip(got.top_ids, got.top_logprobs, best, strict=True):
                assert values == pytest.approx(likeliest.values.tolist(), abs=1e-4)
                assert ids[0] == likeliest.indices[0].item() or values[0] - values[1] < 1e-4
        else:
            assert got.top_ids == []


def test_a_continued_request_gives_the_same_tokens(model: CausalLM) -> None:
    """Another worker continues it from its prompt and output: penalties and min_tokens count the earlier tokens."""
    rng = random.Random(8)
    prompts = [rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 40)) for _ in range(30)]
    samplings = [random_sampling(rng, VOCAB_SIZE, 20) for _ in prompts]
    begin: dict[int, list[ToScheduler]] = {}
    for n, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        begin.setdefault(rng.randrange(20), []).append(Generate(f"r{n}", prompt, sampling))
    whole = serve(model, begin).channel
    goes_on: dict[int, list[ToScheduler]] = {}
    for n, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        if len(tokens := whole.tokens(f"r{n}")) > 1:
            output = tokens[: rng.randint(1, len(tokens) - 1)]
            request = Generate(f"r{n}", prompt, sampling, output)
            goes_on.setdefault(rng.randrange(20), []).append(request)
    rest = serve(model, goes_on, chunk_size=16).channel
    continued = [request for batch in goes_on.values() for request in batch]
    assert len(continued) > 20
    for request in continued:
        assert isinstance(request, Generate)
        assert request.output + rest.tokens(request.rid) == whole.tokens(request.rid)
        assert rest.reason(request.rid) == whole.reason(request.rid)


def test_a_synchronization_shows_whether_the_device_is_lost(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type of the error does not: Triton's launcher and libraries raise it for other reasons as well."""
    cpu = torch.device("cpu")
    capacity = Capacity(4, 16, 2, 32)
    engine = Engine(
        model, capacity, device=cpu, dtype=torch.float32, attention=torch_attention(model.config)
    )
    assert engine.is_usable_after(RuntimeError("out of memory"))
    engine.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert engine.is_usable_after(RuntimeError("out of memory"))

    def lost(device: torch.device) -> None:
        raise torch.AcceleratorError(f"{device}: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert not engine.is_usable_after(RuntimeError("Triton Error [CUDA]: unspecified"))
