"""Trees of drafts with CUDA graphs: the tokens of an engine without drafts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from mla_router.worker.kernels.kv_cache.tree_rows import Trees
from mla_router.worker.kernels.sampling.tree_choice import choose_nodes_torch, choose_nodes_triton
from mla_router.worker.kernels.sampling.tree_growth import (
    Candidates,
    Roots,
    grow_tree_torch,
    grow_tree_triton,
)
from mla_router.worker.tree_shape import TreeShape
from support.drafted_runs import served_on_gpu
from support.tiny_drafter import write_tiny_drafter
from support.tiny_model import VOCAB_SIZE

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * n + 3 * i) % VOCAB_SIZE for i in range(20 + 9 * n)] for n in range(6)]


@pytest.fixture(scope="module", params=["llama_gqa", "v3"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a head for it, or with a model that has a layer of its own."""
    path = tmp_path_factory.mktemp("trees")
    write_tiny_drafter(path, request.param)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("depth", "nodes"), [(3, 16), (2, 5)])
def test_tokens_are_those_without_drafts(folders: Path, dtype: str, depth: int, nodes: int) -> None:
    """With graphs in bfloat16, where noise alone decides: roundings do not matter. In float32 for greedy requests as well."""
    served = partial(
        served_on_gpu, PROMPTS, dtype, chunk_size=32, model_path=str(folders / "model")
    )
    expected, _ = served()
    drafter = {"speculative_algorithm": "NEXTN"}
    if (folders / "eagle").exists():
        drafter = {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": str(folders / "eagle"),
        }
    for overlap in (True, False):
        got, stats = served(
            overlap=overlap,
            **drafter,
            speculative_num_steps=depth,
            speculative_eagle_topk=4,
            speculative_num_draft_tokens=nodes,
        )
        assert got == expected
        if dtype == "bfloat16":
            assert stats.accepted_tokens >= 0.5 * depth * stats.draft_steps > 0


@pytest.mark.parametrize("shape", [TreeShape(4, 3, 8, 30), TreeShape(16, 5, 64, 30)])
def test_growth_is_that_of_the_torch_form(shape: TreeShape) -> None:
    """With many equal confidences, and slots without room."""
    count, device = 32, torch.device("cuda")
    lengths = torch.randint(1, 90, (40,), dtype=torch.int32, device=device)
    slots, bounds = torch.arange(count, device=device), torch.randint(40, 90, (count,)).cuda()
    roots = Roots(slots, bounds, lengths, 6400, shape)
    tables = [
        torch.randint(-4, 0, (count * (shape.topk if depth else 1), shape.topk), device=device)
        for depth in range(shape.depth)
    ]
    found = []
    for grow, choose in (
        (grow_tree_torch, choose_nodes_torch),
        (grow_tree_triton, choose_nodes_triton),
    ):
        candidates, beam = Candidates.empty(count, shape, device), None
        drafts = torch.zeros(40, shape.nodes - 1, dtype=torch.int64, device=device)
        trees = Trees(*(torch.zeros(40, shape.nodes, dtype=torch.int64).cuda() for _ in range(3)))
        beams = []
        for depth, table in enumerate(tables, 1):
            tokens = torch.arange(table.numel(), device=device).view_as(table)
            beam = grow(candidates, beam, tokens, table.float(), depth, roots)
            if depth < shape.depth:  # the last one is not used
                beams += [*beam.rows, *beam[1:]]
        choose(candidates, slots, drafts, trees)
        found.append([*beams, *candidates, drafts, *trees])
    assert all(map(torch.equal, *found))
