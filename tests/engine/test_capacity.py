"""The size of the KV cache on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine.capacity import capacity_without_pages, plan_capacity
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kv_cache.spec import own_window
from mla_router.worker.model.config.read import read_config
from mla_router.worker.step.engine import Capacity
from support.tiny_model import CONFIGS, write_tiny_model

GIB = 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class RanksWithRoom(Group):
    """The other ranks have room for `others` tokens each."""

    def __init__(self, others: list[int]) -> None:
        self.others = others

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat((x, torch.tensor(self.others)), dim)


def planned(
    folder: Path,
    name: str,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.bfloat16,
    group: Group | None = None,
    working_bytes: int = 0,
    **flags: Any,
) -> Capacity:
    write_tiny_model(folder, **CONFIGS[name])
    config = WorkerConfig(str(folder), **flags)
    specs = read_config(folder).kv_cache_specs(dtype)
    empty = capacity_without_pages(config, 2048, own_window(specs), device)
    return plan_capacity(config, empty, specs, device, working_bytes=working_bytes, group=group)


@pytest.mark.parametrize(
    ("name", "values"),
    # Per layer: a latent of 32 and a rotary key of 8; keys and values of 2 heads of 8, and of 2 heads of 16. The tokens of
    # Gemma 2 are those of requests within the window
    [("v3", 3 * (32 + 8)), ("llama_gqa", 3 * 2 * 2 * 8), ("gemma2", 4 * 2 * 2 * 16)],
)
def test_the_memory_of_a_step_comes_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, values: int
) -> None:
    free = 6 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 10 * GIB))

    def cache_bytes(working: int, fraction: float = 0.8) -> int:
        flags: dict[str, Any] = {"mem_fraction_static": fraction, "page_size": 1}
        capacity = planned(tmp_path, name, CUDA, working_bytes=working, **flags)
        return capacity.max_total_tokens * values * 2  # bfloat16

    assert 4 * GIB - 1000 < cache_bytes(0) <= 4 * GIB  # 20% of 10 GiB stay free
    assert cache_bytes(GIB) == cache_bytes(0)  # it fits into them
    assert cache_bytes(4 * GIB) < 2 * GIB
    assert cache_bytes(4 * GIB) == cache_bytes(4 * GIB, fraction=0.9)
    with pytest.raises(ConfigError, match=r"no room for KV cache.*lower --max-running-requests"):
        cache_bytes(6 * GIB)
    with pytest.raises(
        ConfigError, match=r"6\.0 of 10\.0 GiB are free, and 7\.0 stay free.*raise --mem-frac"
    ):
        cache_bytes(0, fraction=0.3)


@pytest.mark.parametrize("others", [0, 3])
def test_memory_of_other_processes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, others: int
) -> None:
    """Two workers on one GPU: each counts the memory of both."""
    own = 4
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: own * GIB)
    free = (10 - own - others) * GIB - GIB // 2  # the rest is the context of this process
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 10 * GIB))
    planned(tmp_path, "v3", CUDA, mem_fraction_static=0.9)
    assert ("Other processes use at least 1.5 of the 10.0 GiB" in caplog.text) == (others > 0)
    if others:
        with pytest.raises(ConfigError, match=r"other processes use 1\.5 or more"):
            planned(tmp_path, "v3", CUDA, mem_fraction_static=0.5)


def test_half_of_the_layers_keep_a_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = {"max_total_tokens": 1024, "page_size": 16}
    with caplog.at_level("INFO"):
        capacity = planned(tmp_path, "gemma2", dtype=torch.float32, **flags)
    assert (capacity.num_pages, capacity.window) == (2 * 1024 // 16, 24)
    # 1,024 and 24 tokens of two layers of 2 KV heads, 16 wide, in float32
    assert "524 bytes a token in a request of 1024, 51%" in caplog.text


def test_a_limit_of_tokens_counts_if_the_memory_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 3 * GIB))
    # 768 MiB stay free, which is more than 2%; 2 bytes of 3 layers with 40 values a token
    flags: dict[str, Any] = {"page_size": 16, "mem_fraction_static": 0.98}
    fitting = (free - 3 * GIB // 4) // 240
    assert planned(tmp_path, "v3", CUDA, **flags).num_pages == fitting // 16
    assert planned(tmp_path, "v3", CUDA, max_total_tokens=1000, **flags).num_pages == 62
    beyond = planned(tmp_path, "v3", CUDA, max_total_tokens=2 * fitting, **flags)
    assert beyond.num_pages == fitting // 16


def test_the_rank_with_the_least_room_counts(tmp_path: Path) -> None:
    least = planned(tmp_path, "v3", max_total_tokens=640, group=RanksWithRoom([660, 330]))
    assert least.num_pages == 330 // least.page_size
    own = planned(tmp_path, "v3", max_total_tokens=320, group=RanksWithRoom([660, 330]))
    assert own.num_pages == 320 // own.page_size


def test_a_window_needs_a_page_of_each_kind(tmp_path: Path) -> None:
    flags = {"page_size": 64, "max_total_tokens": 64}
    assert planned(tmp_path, "gemma2", **flags).num_pages == 2
    assert planned(tmp_path, "v3", **flags).num_pages == 1
    for name in ("gemma2", "v3"):
        with pytest.raises(ConfigError, match="no room for KV cache"):
            planned(tmp_path, name, page_size=64, max_total_tokens=63)


def test_the_log_has_the_bytes_of_all_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        capacity = planned(tmp_path, "v3", page_size=64, max_total_tokens=3 << 22)
    assert capacity.num_pages == 3 << 16
    assert "2.81 GiB" in caplog.text
    assert "bfloat16, 12582912 tokens in pages of 64, 240 bytes a token" in caplog.text


def test_drafts_are_further_tokens_of_a_row(tmp_path: Path) -> None:
    flags = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}
    assert planned(tmp_path, "v3", **flags).tokens_per_row == 4
    assert planned(tmp_path, "v3").tokens_per_row == 1


def test_room_for_images() -> None:
    def capacity(device: torch.device, context: int, takes_images: bool = True) -> Capacity:
        return capacity_without_pages(
            WorkerConfig(), context, None, device, takes_images=takes_images
        )

    assert capacity(CPU, 4096, takes_images=False).image_tokens == 0
    on_cpu, on_gpu = capacity(CPU, 1 << 20), capacity(CUDA, 1 << 20)
    assert (on_cpu.image_tiles, on_gpu.image_tiles) == (1, 8)
    assert on_cpu.image_tokens == on_gpu.image_tokens == 1 << 20  # those of one prompt
    assert capacity(CUDA, 4096).image_tokens == 1 << 16


def test_a_cache_beyond_the_memory_of_the_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"9999999999 tokens take \d+\.\d GiB, and this"):
        planned(tmp_path, "v3", max_total_tokens=9_999_999_999)
