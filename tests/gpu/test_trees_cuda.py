"""Trees of drafts with CUDA graphs: the tokens of an engine without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mla_router.worker.config import WorkerConfig
from mla_router.worker.core import SamplingParams
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.messages import Generate, Stats, ToScheduler
from support.scripted_scheduler import run
from support.tiny_eagle import write_tiny_eagle
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.gpu

# At this temperature the noise of its position decides a token, and a draft as well
NOISE_ALONE = 1e6
REQUESTS, TOKENS = 6, 41


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trees")
    write_tiny_model(path / "model", **CONFIGS["llama_gqa"])
    write_tiny_eagle(path / "eagle", path / "model", bias=True)
    return path


def served(
    folders: Path, dtype: str, *, overlap: bool = True, **settings: Any
) -> tuple[list[list[int]], Stats]:
    """Returns the tokens of requests of which some are decided by noise alone, the others greedy."""
    engine = load_engine(
        WorkerConfig(
            model_path=str(folders / "model"),
            device="cuda",
            dtype=dtype,
            max_total_tokens=8192,
            max_running_requests=8,
            max_prefill_tokens=256,
            piecewise_cuda_graph_max_tokens=256,
            **settings,
        )
    )
    script: dict[int, list[ToScheduler]] = {}
    for n in range(REQUESTS):
        noisy = n % 2 == 0 or dtype != "float32"
        sampling = SamplingParams(TOKENS, temperature=NOISE_ALONE if noisy else 0.0, seed=n)
        prompt = [(7 * n + 3 * i) % VOCAB_SIZE for i in range(20 + 9 * n)]
        script.setdefault(2 * n, []).append(Generate(f"r{n}", prompt, sampling))
    ran = run(
        script,
        engine=engine,
        capacity=engine.capacity,
        vocab_size=engine.model.config.vocab_size,
        overlap=overlap,
        chunk_size=32,
    )
    return [ran.channel.tokens(f"r{n}") for n in range(REQUESTS)], ran.scheduler.stats()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("depth", "nodes"), [(3, 16), (2, 5)])
def test_tokens_are_those_without_drafts(folders: Path, dtype: str, depth: int, nodes: int) -> None:
    """With graphs in bfloat16, where noise alone decides: roundings do not matter. In float32 for greedy requests as well."""
    expected, _ = served(folders, dtype)
    for overlap in (True, False):
        got, stats = served(
            folders,
            dtype,
            overlap=overlap,
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=str(folders / "eagle"),
            speculative_num_steps=depth,
            speculative_eagle_topk=4,
            speculative_num_draft_tokens=nodes,
        )
        assert got == expected
        if dtype == "bfloat16":
            assert stats.accepted_tokens >= 0.5 * stats.draft_tokens > 0
