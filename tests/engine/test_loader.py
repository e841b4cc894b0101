"""From settings to an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.model.config.fields import ModelError
from support.tiny_model import CONFIGS, write_tiny_model


def test_only_a_dummy_needs_no_weights(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    (tmp_path / "model.safetensors").unlink()
    settings = {"model_path": str(tmp_path), "device": "cpu", "max_total_tokens": 64}
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        load_engine(WorkerConfig(**settings))
    engine = load_engine(WorkerConfig(**settings, load_format="dummy"))
    assert engine.capacity.max_total_tokens == 64
