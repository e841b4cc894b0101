"""Nodes compare what their ranks compute with, and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mla_router.worker.config import WorkerConfig
from mla_router.worker.nodes.equal import difference, facts, model_digest

BASE: dict[str, Any] = {
    "tp_size": 4,
    "nnodes": 2,
    "dist_init_addr": "10.0.0.1:5000",
    "dist_key": "k" * 16,
    "device": "cpu",
}


def compared(**changed: Any) -> str | None:
    here, there = WorkerConfig(**BASE), WorkerConfig(**{**BASE, **changed})
    return difference(facts(here), facts(there), 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tp_size": 8}, "--tp-size differs between the nodes: 4 on node 0, 8 on node 1"),
        ({"ep_size": 2}, "--ep-size"),
        ({"nnodes": 4}, "--nnodes"),
        ({"dtype": "float32"}, "--dtype differs between the nodes: auto on node 0, float32"),
        ({"page_size": 32}, "--page-size"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype"),
        ({"max_total_tokens": 4096}, "--max-total-tokens"),
        ({"device": "cuda"}, "--device differs between the nodes: cpu on node 0, cuda on node 1"),
    ],
)
def test_a_different_setting_is_named(changed: dict[str, Any], message: str) -> None:
    found = compared(**changed)
    assert found is not None and found.startswith(message)


def test_settings_of_one_machine_may_differ() -> None:
    same = compared(
        node_rank=1,
        dist_init_addr="node-0:5000",
        base_gpu_id=4,
        cpu_threads=3,
        host="10.0.0.2",
        port=9,
        log_level="debug",
        api_key="secret",
    )
    assert same is None


def test_secrets_are_not_sent() -> None:
    keys = {
        spec.name: "s3cret-of-a-test"
        for spec in dataclasses.fields(WorkerConfig)
        if "variable" in spec.metadata
    }
    assert len(keys) >= 4
    assert "s3cret" not in str(facts(WorkerConfig(**{**BASE, **keys})))


def test_another_model_is_named_and_another_folder_is_not(tmp_path: Path) -> None:
    def folder(name: str, config: str, weights: bytes) -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(config)
        (made / "model.safetensors").write_bytes(weights)
        return made

    first = folder("first", "{}", b"12")
    assert model_digest(folder("copy", "{}", b"12")) == model_digest(first)
    for name, config, weights in (("other", '{"a": 1}', b"12"), ("more", "{}", b"123")):
        found = compared(model_path=str(folder(name, config, weights)))
        assert found is not None and found.startswith("--model-path differs")


def test_another_version_is_named() -> None:
    here = facts(WorkerConfig(**BASE))
    assert {"torch", "mla-router", "Python"} <= here.keys()
    found = difference(here, {**here, "torch": "1.0"}, 3)
    assert found is not None and found.startswith("torch differs") and "1.0 on node 3" in found
    without = {name: value for name, value in here.items() if name != "--dtype"}
    assert difference(here, without, 1) is not None
