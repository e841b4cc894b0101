"""--init-expert-location and --ep-num-redundant-experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine.expert_location import choose_placement
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.parallel.balance import balanced
from mla_router.worker.model.parallel.placement import Placement, trivial
from support.tiny_model import CONFIGS, write_tiny_model

LAYERS, EXPERTS = 3, 8
CONFIG = CONFIGS["v3"] | {"num_hidden_layers": LAYERS, "n_routed_experts": EXPERTS}


def chosen(folder: Path, **settings: Any) -> Placement | None:
    write_tiny_model(folder / "model", **CONFIG)
    config = WorkerConfig(tp_size=2, **({"ep_size": 2} | settings))
    return choose_placement(config, read_config(folder / "model"))


def test_in_order(tmp_path: Path) -> None:
    assert chosen(tmp_path, ep_size=1) is None
    assert chosen(tmp_path) == trivial(LAYERS, EXPERTS, 2)
    assert chosen(tmp_path, ep_num_redundant_experts=2) == trivial(LAYERS, EXPERTS, 2, 2)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "location.json"
    counts = [[layer, 9, *range(EXPERTS - 2)] for layer in range(LAYERS)]
    file.write_text(json.dumps({"logical_count": counts, "other": 1}))
    settings = {"init_expert_location": str(file), "ep_num_redundant_experts": 2}
    expected = balanced(counts, 2, 2)
    assert chosen(tmp_path, **settings) == expected
    file.write_text(json.dumps({"physical_to_logical_map": expected.layers}))
    assert chosen(tmp_path, **settings) == expected


ROW = [1] * EXPERTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "truncated"),
        ('{"a": ' + "[" * 100_000, "recursion depth"),
        ("{}", "either logical_count or physical_to_logical_map is needed"),
        (
            json.dumps({"logical_count": [ROW], "physical_to_logical_map": [ROW]}),
            "either logical_count or",
        ),
        (json.dumps({"logical_count": [ROW]}), rf"not \[{LAYERS}, {EXPERTS}\] numbers"),
        (json.dumps({"logical_count": [[-1, *ROW[1:]]] * LAYERS}), ">= 0"),
        (
            json.dumps({"physical_to_logical_map": [ROW] * LAYERS}),
            f"layer 0 of the expert location: not replicas of experts 0 to {EXPERTS - 1}",
        ),
        (None, "No such file"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "location.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"^--init-expert-location {file}: .*{message}"):
        chosen(tmp_path, init_expert_location=str(file))


def test_only_experts_are_counted(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["llama_gqa"])
    config = WorkerConfig(enable_expert_distribution_metrics=True)
    with pytest.raises(
        ConfigError, match=r"^--enable-expert-dist\S+ this LlamaForCausalLM has no rout"
    ):
        choose_placement(config, read_config(tmp_path))


def test_an_impossible_number_of_replicas_names_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="9 cannot be divided into 2 equal parts"):
        chosen(tmp_path, ep_num_redundant_experts=1)
