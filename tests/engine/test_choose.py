"""The choices by the settings and the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_router.worker.config import SMALL_MODEL, ConfigError, WorkerConfig
from mla_router.worker.engine.choose import (
    MAX_EXCHANGED_ROWS,
    choose_config,
    choose_device,
    choose_dtype,
    choose_graph_sizes,
)
from mla_router.worker.engine.runners.choose import MAX_INPUT_TOKENS
from mla_router.worker.kernels.comm.groups import Groups
from mla_router.worker.model.config.read import read_config
from support.attention import torch_attention, triton_attention
from support.positions import Position


def test_graphs_have_room_for_chunks_beside_a_full_batch() -> None:
    device = torch.device("cuda")
    attention = triton_attention(read_config(SMALL_MODEL))

    def sizes(**settings: Any) -> Sequence[int]:
        return choose_graph_sizes(WorkerConfig(**settings), device, attention).decode

    assert max(sizes(max_running_requests=5)) == 5 + MAX_INPUT_TOKENS
    assert max(sizes(max_running_requests=1000, cuda_graph_max_bs=100)) == 100
    assert max(sizes(max_running_requests=5, cuda_graph_max_bs=3)) == 3
    assert sizes(max_running_requests=5, cuda_graph_bs="1,4") == [1, 4]


def test_graphs_of_a_drafter_are_by_slots() -> None:
    device, attention = torch.device("cuda"), triton_attention(read_config(SMALL_MODEL))
    drafts = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
    config = WorkerConfig(speculative_max_bs=8, **drafts)  # type: ignore[arg-type]
    sizes = choose_graph_sizes(config, device, attention)
    assert sizes.drafts == [1, 2, 3, 4, 6, 8]
    assert sizes.verify == [3 * size for size in sizes.drafts]
    # The drafter needs the attention of a prompt's step
    plain = choose_graph_sizes(WorkerConfig(), device, attention)
    assert replace(sizes, verify=[], drafts=[], prefill=plain.prefill) == plain


def test_dp_ranks_have_no_graphs_of_one_prompt_alone_nor_of_many_rows() -> None:
    device, attention = torch.device("cuda"), triton_attention(read_config(SMALL_MODEL))
    alone = choose_graph_sizes(WorkerConfig(), device, attention)
    assert alone.prefill
    groups = Groups(exchange=Position(1, 2))
    together = choose_graph_sizes(WorkerConfig(), device, attention, groups)
    shared = [size for size in alone.piecewise if size <= MAX_EXCHANGED_ROWS]
    assert shared[-1] == MAX_EXCHANGED_ROWS < alone.piecewise[-1]
    assert together == replace(alone, piecewise=shared, prefill=())


def test_torch_compile_is_for_cuda_graphs() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    with_graphs = triton_attention(read_config(SMALL_MODEL))
    compiling = WorkerConfig(enable_torch_compile=True, torch_compile_max_bs=8)
    assert choose_graph_sizes(compiling, cuda, with_graphs).compiled == 8
    assert choose_graph_sizes(WorkerConfig(), cuda, with_graphs).compiled == 0
    without_graphs = WorkerConfig(enable_torch_compile=True, disable_cuda_graph=True)
    for config, device, attention, obstacle in (
        (without_graphs, cuda, with_graphs, "--disable-cuda-graph"),
        (compiling, cpu, with_graphs, "device cpu"),
        (compiling, cuda, torch_attention(read_config(SMALL_MODEL)), "attention backend torch"),
    ):
        with pytest.raises(ConfigError, match=f"--enable-torch-compile: .*with {obstacle} there"):
            choose_graph_sizes(config, device, attention)


def test_torch_compile_is_for_plain_weights() -> None:
    assert choose_config(WorkerConfig(enable_torch_compile=True)).quantization is None
    quantized = WorkerConfig(enable_torch_compile=True, quantization="fp8")
    with pytest.raises(ConfigError, match=r"--enable-torch-compile: .* are float8_e4m3fn"):
        choose_config(quantized)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [({"model_path": "/m"}, True), ({"model_path": "/m", "device": "cpu"}, False), ({}, False)],
)
def test_a_model_without_a_gpu_is_named(
    settings: dict[str, str],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The shipped model runs on a CPU silently."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device(WorkerConfig(**settings)).type == "cpu"  # type: ignore[arg-type]
    assert ("this model runs on the CPU" in caplog.text) == warned


@pytest.mark.parametrize(
    ("asked", "device", "checkpoint", "chosen"),
    [
        ("auto", "cpu", "bfloat16", torch.float32),
        ("auto", "cuda", "bfloat16", torch.bfloat16),
        ("auto", "cuda", "float16", torch.float16),
        ("auto", "cuda", "float32", torch.bfloat16),
        ("float32", "cuda", "float32", torch.float32),
        ("bfloat16", "cpu", "float32", torch.bfloat16),
    ],
)
def test_dtype(asked: str, device: str, checkpoint: str, chosen: torch.dtype) -> None:
    """Attention kernels of a GPU need 16 bits."""
    model = replace(read_config(SMALL_MODEL), dtype=checkpoint)
    assert choose_dtype(WorkerConfig(dtype=asked), model, torch.device(device)) is chosen
