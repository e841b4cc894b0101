"""The size of the KV cache on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine.capacity import plan_capacity
from mla_router.worker.model.config.read import read_config
from support.tiny_model import CONFIGS, write_tiny_model

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "values"),
    # Per layer: a latent of 32 and a rotary key of 8; keys and values of 2 heads of 8, and of 2 heads of 16. The tokens of
    # Gemma 2 are those of requests within the window
    [("v3", 3 * (32 + 8)), ("llama_gqa", 3 * 2 * 2 * 8), ("gemma2", 4 * 2 * 2 * 16)],
)
def test_the_memory_of_a_step_comes_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, values: int
) -> None:
    write_tiny_model(tmp_path, **CONFIGS[name])
    model = read_config(tmp_path)
    free = 6 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 10 * GIB))

    def cache_bytes(working: int, fraction: float = 0.8) -> int:
        config = WorkerConfig(str(tmp_path), mem_fraction_static=fraction, page_size=1)
        capacity = plan_capacity(
            config, model, torch.bfloat16, torch.device("cuda"), working_bytes=working
        )
        return capacity.max_total_tokens * values * 2  # bfloat16

    assert 4 * GIB - 1000 < cache_bytes(0) <= 4 * GIB  # 20% of 10 GiB stay free
    assert cache_bytes(GIB) == cache_bytes(0)  # it fits into them
    assert cache_bytes(4 * GIB) < 2 * GIB
    assert cache_bytes(4 * GIB) == cache_bytes(4 * GIB, fraction=0.9)
    with pytest.raises(ConfigError, match="no room for KV cache"):
        cache_bytes(6 * GIB)


def test_half_of_the_layers_keep_a_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_model(tmp_path, **CONFIGS["gemma2"])
    config = WorkerConfig(str(tmp_path), max_total_tokens=1024, page_size=16)
    with caplog.at_level("INFO"):
        capacity = plan_capacity(config, read_config(tmp_path), torch.float32, torch.device("cpu"))
    assert (capacity.num_pages, capacity.window) == (2 * 1024 // 16, 24)
    # 1,024 and 24 tokens of two layers of 2 KV heads, 16 wide, in float32
    assert "524 bytes a token in a request of 1024, 51%" in caplog.text
