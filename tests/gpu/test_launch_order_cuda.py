"""In captured decode steps, data that a kernel reads before its wait is older than a kernel that has waited for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mla_router.worker.engine.attention.choose import choose_attention
from mla_router.worker.engine.engine import Engine
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from support.captured_graph import Graph, read_graph, unsettled
from support.tiny_model import CONFIGS, write_tiny_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
READERS = (
    "attend_kernel",
    "attend_hopper_kernel",
    "attend_fp8_kernel",
    "merge_kernel",
    "_rope_absorb_kernel",
    "_rope_gqa_write_kernel",
)
WRITERS = ("schedule_kernel", "_find", "_look_up_kernel", "_window_locations_kernel")


# Widths of published models, for which there are GPU kernels
LATENT = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 128}
GROUPED = {"head_dim": 64}


def captured_step(folder: Path, config: dict[str, Any], size: int) -> Graph:
    write_tiny_model(folder, **config)
    model = load_model(folder, device=CUDA, dtype=torch.bfloat16)
    attention = choose_attention("triton", model.config, CUDA, torch.bfloat16)
    capacity = Capacity(num_pages=2000, page_size=16, num_slots=size, context_length=160)
    engine = Engine(model, capacity, device=CUDA, dtype=torch.bfloat16, attention=attention)
    rows = engine.slots.idle_rows(size)
    engine.forward_pass.decode(rows)  # compiles, which a capture does not permit
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        engine.forward_pass.decode(rows)
    return read_graph(graph)


@pytest.mark.parametrize("size", [1, 8, 160])
@pytest.mark.parametrize(
    ("name", "widths"),
    [("v2_lite", LATENT), ("v3", LATENT), ("llama_gqa", GROUPED), ("gemma2", GROUPED)],
    ids=["v2_lite", "v3", "llama_gqa", "gemma2"],
)
def test_settled_arguments_are_older_than_a_kernel_that_waits(
    tmp_path: Path, name: str, widths: dict[str, int], size: int
) -> None:
    graph = captured_step(tmp_path, CONFIGS[name] | widths, size)
    assert graph.named(*READERS) and graph.named("schedule_kernel"), graph.names
    assert any(edge.is_programmatic for edge in graph.edges), graph.names
    assert unsettled(graph, READERS, WRITERS) == []
