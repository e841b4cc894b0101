"""How much of a GPU the KV cache may have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine.capacity import plan_capacity
from mla_router.worker.model.registry import read_config
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "values"),
    # Of each layer: a latent of 32 and a rotary key of 8; keys and values of 2 heads of 8.
    [("v3", 3 * (32 + 8)), ("llama_gqa", 3 * 2 * 2 * 8)],
)
def test_penalties_have_their_memory_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, values: int
) -> None:
    write_tiny_model(tmp_path, **CONFIGS[name])
    model = read_config(tmp_path)
    free = 3 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 10 * GIB))

    def tokens(requests: int) -> int:
        config = WorkerConfig(
            str(tmp_path), mem_fraction_static=0.8, max_running_requests=requests, page_size=1
        )
        capacity = plan_capacity(config, model, torch.bfloat16, torch.device("cuda"))
        return capacity.max_total_tokens

    token_bytes = values * 2  # bfloat16
    for requests in (1, 1000):
        left = GIB - 4 * requests * VOCAB_SIZE - tokens(requests) * token_bytes
        assert 0 <= left < 2 * token_bytes
    free = 2 * GIB + 4000 * VOCAB_SIZE
    with pytest.raises(ConfigError, match="no room for KV cache"):
        tokens(1000)
